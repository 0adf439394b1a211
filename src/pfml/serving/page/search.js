// Search by upload, drop, paste or click; results as a grid.

import { api, attempt, element, fileName, imageUrl, indexedImage, percent, readable, toast } from "/page/api.js";
import { showWhy } from "/page/why.js";

const byId = (id) => document.getElementById(id);
const PAGE = 48;

export function start({ status, classes, edits, showFacts, openClass }) {
  let chosen = [];
  let query = null; // {image} of the index, or {file, upload}
  let last = null; // the pending request, which a newer one replaces
  let preview = null;

  const k = () => Number(byId("k").value);
  const filter = () => chosen.map((one) => one.name);

  function card(image, hit) {
    const text = `${readable(image.class_name)}, ${image.name}`;
    const label = element(
      "button",
      { class: "card-main", title: image.name, "aria-label": `Search by ${text}`, onclick: () => byImage(image) },
      indexedImage(image.id, text),
      element("span", { class: "card-class" }, readable(image.class_name)),
      element("span", { class: "card-name" }, fileName(image.name)),
    );
    const why = () => showWhy({ id: image.id }, image.name, byImage);
    const facts = element(
      "div",
      { class: "card-facts" },
      hit ? element("span", { class: "distance", title: "distance" }, hit.distance.toFixed(3)) : null,
      element("a", { class: "link", href: imageUrl(image.id, "full"), target: "_blank", rel: "noopener", "aria-label": `Open ${text} in full size` }, "open"),
      element("button", { class: "link", "aria-label": `Why is ${text} here?`, onclick: why }, "why?"),
    );
    return element("li", { class: "card", "data-id": image.id }, label, facts);
  }

  // The hits as cards; those of an unknown query are behind one divider.
  function cardsOf({ hits, unknown }) {
    const cards = hits.map((hit) => card(hit, hit));
    return hits.length && unknown ? [element("li", { class: "divider" }, "beyond the threshold: the nearest, but not near"), ...cards] : cards;
  }

  function showGrid(cards, title, note, emptyText) {
    byId("grid").replaceChildren(...cards);
    byId("results-title").textContent = title;
    byId("results-note").textContent = note;
    byId("grid-empty").hidden = cards.length > 0;
    byId("grid-empty").textContent = emptyText;
  }

  function showQuery() {
    const shown = byId("query-image");
    byId("query-facts").hidden = query === null;
    byId("drop-hint").hidden = query !== null;
    shown.hidden = query === null;
    if (preview) URL.revokeObjectURL(preview);
    preview = query?.file ? URL.createObjectURL(query.file) : null;
    if (query === null) return shown.removeAttribute("src");
    shown.src = preview ?? imageUrl(query.image.id, "large");
    byId("query-delete").hidden = !query.image;
    showName();
    byId("query-verdict").replaceChildren();
  }

  function showName() {
    byId("query-name").textContent = query.image
      ? `${readable(query.image.class_name)} · ${query.image.name}`
      : query.file.name || "pasted image";
  }

  function showAnswer(answer) {
    if (query?.file) query.upload = answer.query.upload;
    showFacts(answer.threshold);
    byId("query-verdict").replaceChildren(...verdictParts(answer));
    const note = [];
    if (answer.hits.length) {
      const same = query?.image?.class_name
        ? answer.hits.filter((hit) => hit.class_name === query.image.class_name).length
        : null;
      if (same !== null) note.push(`${same} of ${answer.hits.length} of the same class`);
      if (!answer.threshold) note.push("no threshold: pfml calibrate finds one");
    }
    byId("more").hidden = true;
    showGrid(cardsOf(answer), "Nearest images", note.join(" · "), "No image of these classes is in the index.");
  }

  // The most likely class with its votes, and whether the query is known.
  function verdictParts({ verdict, unknown, hits }) {
    if (!hits.length) return [];
    const parts = verdict.class_name
      ? [
          element("strong", {}, element("button", { class: "name", title: "Show this class", onclick: () => openClass(verdict.class_name) }, verdict.class_name)),
          `, ${verdict.votes} of ${verdict.of} `,
          element("span", { class: "quiet" }, `· ${percent(verdict.potential, 0)} of the pull`),
        ]
      : ["the nearest images have no class"];
    if (unknown === null) return parts;
    const badge = unknown ? "unknown" : "known";
    return [element("span", { class: `badge ${badge}` }, badge), unknown ? " at best " : " ", ...parts];
  }

  async function search() {
    last?.abort();
    last = new AbortController();
    const signal = last.signal;
    if (query === null) return browse(0);
    byId("grid").setAttribute("aria-busy", "true");
    const answer = await attempt(() => {
      if (query.image) return api.search({ id: query.image.id, k: k(), class_name: filter() }, { signal });
      if (query.upload) return api.search({ upload: query.upload, k: k(), class_name: filter() }, { signal });
      return api.upload(query.file, k(), filter(), { signal });
    });
    if (signal.aborted) return;
    byId("grid").removeAttribute("aria-busy");
    if (answer) showAnswer(answer);
    else if (query.file && !query.upload) clear();
  }

  async function browse(offset) {
    const only = chosen.length ? chosen : [null];
    const pages = await attempt(() =>
      Promise.all(only.map((one) => api.images({ class_name: one?.name, order: "mixed", offset, limit: PAGE }))),
    );
    if (!pages || query !== null) return;
    const total = pages.reduce((sum, page) => sum + page.total, 0);
    const cards = pages.flatMap((page) => page.images.map((image) => card(image)));
    if (offset) byId("grid").append(...cards);
    else showGrid(cards, "Images of the index", `${total.toLocaleString("en")} images: click one to search by it`, "The index is empty: pfml index RUN FOLDER adds images.");
    const shown = byId("grid").children.length;
    byId("more").hidden = shown >= total || cards.length === 0;
    byId("more").onclick = () => browse(offset + PAGE);
  }

  // The same query and filter again, by the names that classes have now.
  async function changed(renamed) {
    fillNames();
    const names = new Set(chosen.map((one) => (one.name === renamed?.from ? renamed.to : one.name)));
    chosen = classes.filter((one) => one.images && names.has(one.name));
    if (query?.image) {
      query.image = await api.image(query.image.id).catch(() => null); // null if it was deleted
      if (!query.image) query = null;
      showQuery();
    }
    showChips();
  }

  function byImage(image) {
    query = { image };
    showQuery();
    search();
    scrollTo({ top: 0, behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
  }

  function byFile(file) {
    if (file.size > status.most_upload_bytes) {
      const limit = (status.most_upload_bytes / 2 ** 20).toFixed(0);
      return toast(`An image must have at most ${limit} MiB, got ${(file.size / 2 ** 20).toFixed(1)} MiB.`);
    }
    query = { file };
    showQuery();
    search();
  }

  function clear() {
    query = null;
    byId("file").value = "";
    showQuery();
    search();
  }

  function showChips() {
    const chips = chosen.map((one) =>
      element("button", { class: "chip", "aria-label": `Remove ${one.name}`, onclick: () => remove(one) }, one.name, element("span", { "aria-hidden": "true" }, " ✕")),
    );
    byId("chips").replaceChildren(...chips);
    byId("edit-class").hidden = chosen.length !== 1;
    search();
  }

  function remove(one) {
    chosen.splice(chosen.indexOf(one), 1);
    showChips();
  }

  function fillNames() {
    byId("class-names").replaceChildren(
      ...classes.filter((one) => one.images).map((one) => element("option", { value: one.name }, `${one.images} images`)),
    );
  }

  fillNames();
  byId("class-filter").addEventListener("input", (event) => {
    const found = classes.find((one) => one.name === event.target.value && one.images);
    if (!found || chosen.includes(found)) return;
    event.target.value = "";
    chosen.push(found);
    showChips();
  });
  byId("k").addEventListener("input", () => (byId("k-shown").textContent = byId("k").value));
  byId("k").addEventListener("change", () => query && search());
  byId("file").addEventListener("change", (event) => event.target.files[0] && byFile(event.target.files[0]));
  byId("query-clear").addEventListener("click", clear);
  byId("query-delete").addEventListener("click", () => edits.deleteImages([query.image.id]));
  byId("edit-class").addEventListener("click", () => openClass(chosen[0].name));
  byId("query-why").addEventListener("click", () => {
    if (query?.image) showWhy({ id: query.image.id }, query.image.name, byImage);
    else if (query?.upload) showWhy({ upload: query.upload }, query.file.name || "pasted image", byImage, preview);
  });

  const drop = byId("drop");
  let depth = 0;
  const dragging = (on) => drop.classList.toggle("over", on);
  addEventListener("dragenter", (event) => {
    event.preventDefault();
    depth += 1;
    dragging(true);
  });
  addEventListener("dragleave", () => {
    depth = Math.max(0, depth - 1);
    if (!depth) dragging(false);
  });
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => {
    event.preventDefault();
    depth = 0;
    dragging(false);
    const file = event.dataTransfer?.files[0];
    if (!file) return;
    location.hash = "search";
    byFile(file);
  });
  addEventListener("paste", (event) => {
    const item = [...(event.clipboardData?.items ?? [])].find((one) => one.kind === "file");
    if (!item) return;
    location.hash = "search";
    byFile(item.getAsFile());
  });

  return { byImage, changed, shown: (first) => first && query === null && search() };
}
