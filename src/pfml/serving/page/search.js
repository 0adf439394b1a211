// Search by upload, drop, paste or click, by several images and by parts of them; results as a grid.

import { api, attempt, element, fileName, imageUrl, indexedImage, percent, readable, toast } from "/page/api.js";
import { chooseCrop, cropPreview } from "/page/crop.js";
import { showWhy } from "/page/why.js";

const byId = (id) => document.getElementById(id);
const PAGE = 48;

export function start({ status, classes, edits, showFacts, openClass }) {
  let chosen = [];
  let query = null; // {like, unlike}: lists of {image} of the index or {file, upload}, each with a crop and a preview
  let last = null; // the pending request, which a newer one replaces

  const k = () => Number(byId("k").value);
  const filter = () => chosen.map((one) => one.name);
  const where = () => byId("where").value.trim();
  const only = () => (query?.like.length === 1 ? query.like[0] : null);
  const nameOf = (item) => (item.image ? item.image.name : item.file.name || "pasted image");
  const wholeUrl = (item) => item.whole ?? imageUrl(item.image.id, "large");
  const shownUrl = (item) => item.preview ?? wholeUrl(item);
  const shownText = (value) => (Array.isArray(value) ? value.join(", ") : String(value));

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
    const entries = Object.entries(image.metadata ?? {});
    const known = entries.length
      ? element("p", { class: "card-meta", title: entries.map(([name, value]) => `${name}: ${shownText(value)}`).join("\n") }, entries.map(([name, value]) => `${name} ${shownText(value)}`).join(" · "))
      : null;
    const vote = (list, sign, words) => element("button", { class: "vote", title: words, "aria-label": `${words}: ${text}`, onclick: () => addItem(list, { image }) }, sign);
    const votes = element("div", { class: "votes" }, vote("like", "+", "More like this"), query ? vote("unlike", "−", "Not like this") : null);
    return element("li", { class: "card", "data-id": image.id }, label, known, facts, votes);
  }

  // The values of an image as terms and descriptions.
  function describe(list, entries) {
    list.replaceChildren(...entries.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, shownText(value))]));
    list.hidden = entries.length === 0;
  }

  // The hits as cards; those of an unknown query are behind one divider.
  function cardsOf({ hits, unknown }) {
    const cards = hits.map((hit) => card(hit, hit));
    return hits.length && unknown ? [element("li", { class: "divider" }, "below the threshold: the nearest images, probably of other classes"), ...cards] : cards;
  }

  function showGrid(cards, title, note, emptyText) {
    byId("grid").replaceChildren(...cards);
    byId("results-title").textContent = title;
    byId("results-note").textContent = note;
    byId("grid-empty").hidden = cards.length > 0;
    byId("grid-empty").textContent = emptyText;
  }

  function showQuery() {
    const [item, shown] = [only(), byId("query-image")];
    byId("query-facts").hidden = query === null;
    byId("drop-hint").hidden = item !== null;
    shown.hidden = item === null;
    for (const name of ["query-crop", "query-why", "query-name"]) byId(name).hidden = item === null;
    if (item?.image && item.crop) byId("query-why").hidden = true; // the field is that of the whole image
    byId("query-delete").hidden = !item?.image;
    showPicked();
    describe(byId("query-metadata"), Object.entries(item?.image?.metadata ?? {}));
    if (item === null) shown.removeAttribute("src");
    else {
      shown.src = shownUrl(item);
      showName();
    }
    byId("query-verdict").replaceChildren();
  }

  function showName() {
    const item = only();
    const name = item.image ? `${readable(item.image.class_name)} · ${item.image.name}` : nameOf(item);
    byId("query-name").textContent = item.crop ? `A part of ${name}` : name;
  }

  // The images of a query of several; each is a button that takes it out.
  function showPicked() {
    const several = query !== null && query.like.length + query.unlike.length > 1;
    byId("query-set").hidden = query === null;
    byId("combine-field").hidden = !(query?.like.length > 1);
    for (const list of ["like", "unlike"]) {
      const items = several ? query[list] : [];
      const picked = items.map((item) =>
        element("li", {}, element("button", { "aria-label": `Take out ${nameOf(item)}`, title: nameOf(item), onclick: () => takeOut(list, item) }, element("img", { src: item.preview ?? item.whole ?? imageUrl(item.image.id), alt: "" }))),
      );
      byId(list).replaceChildren(...picked);
      byId(list).hidden = byId(`${list}-title`).hidden = items.length === 0;
    }
  }

  function release(item) {
    for (const address of [item.preview, item.whole]) if (address) URL.revokeObjectURL(address);
  }

  function replaceQuery(next) {
    const items = (of) => (of ? [...of.like, ...of.unlike] : []);
    items(query).filter((item) => !items(next).includes(item)).forEach(release);
    query = next;
    showQuery();
    search();
  }

  function addItem(list, item) {
    if (query === null) return replaceQuery({ like: [item], unlike: [] });
    for (const other of ["like", "unlike"]) query[other] = query[other].filter((one) => !item.image || one.image?.id !== item.image.id);
    query[list].push(item);
    if (!query.like.length) return replaceQuery(null);
    showQuery();
    search();
  }

  function takeOut(list, item) {
    query[list] = query[list].filter((one) => one !== item);
    if (!query.like.length) return clear();
    release(item);
    showQuery();
    search();
  }

  async function cropQuery() {
    const item = only();
    const crop = await chooseCrop(wholeUrl(item), nameOf(item), item.crop);
    if (crop === undefined || item !== only()) return;
    if (item.preview) URL.revokeObjectURL(item.preview);
    Object.assign(item, { crop, upload: null, preview: crop ? await attempt(() => cropPreview(wholeUrl(item), crop)) : null });
    showQuery();
    search();
  }

  function showAnswer(answer) {
    showFacts(answer.threshold);
    byId("query-verdict").replaceChildren(...verdictParts(answer));
    const note = [];
    if (answer.hits.length) {
      const className = query.unlike.length ? null : only()?.image?.class_name;
      const same = className ? answer.hits.filter((hit) => hit.class_name === className).length : null;
      if (same !== null) note.push(`${same} of ${answer.hits.length} of the same class`);
      if (!answer.threshold) note.push("no threshold: pfml calibrate finds one");
    }
    byId("more").hidden = true;
    showGrid(cardsOf(answer), "Nearest images", note.join(" · "), where() ? "No image passes the filter." : "No image of these classes is in the index.");
  }

  // The most likely class with its votes, and whether the query is known.
  function verdictParts({ verdict, unknown, hits }) {
    if (!hits.length) return [];
    const parts = verdict.class_name
      ? [
          element("strong", {}, element("button", { class: "name", title: "Show this class", onclick: () => openClass(verdict.class_name) }, verdict.class_name)),
          `, ${verdict.votes} of ${verdict.of} `,
          element("span", { class: "quiet" }, `· ${percent(verdict.potential, 0)} of their pull`),
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
    const asked = query;
    const answer = await attempt(async () => {
      const [like, unlike] = await Promise.all([asked.like, asked.unlike].map((items) => Promise.all(items.map((item) => named(item, signal)))));
      return filtered(() => api.query({ like, unlike, combine: byId("combine").value, k: k(), class_name: filter(), where: where() }, { signal }));
    });
    if (signal.aborted) return;
    byId("grid").removeAttribute("aria-busy");
    if (answer) showAnswer(answer);
    else if ([...query.like, ...query.unlike].some((item) => item.file && !item.upload)) {
      const kept = (items) => items.filter((item) => item.image || item.upload);
      const left = { like: kept(query.like), unlike: kept(query.unlike) };
      byId("file").value = byId("add-file").value = "";
      replaceQuery(left.like.length ? left : null);
    }
  }

  // An image of a query as the server knows it.
  async function named(item, signal) {
    if (item.file) {
      item.upload ??= await api.upload(item.file, item.crop, { signal });
      return { upload: item.upload };
    }
    const [x, y, width, height] = item.crop ?? [];
    return { id: item.image.id, crop: item.crop ? { x, y, width, height } : null };
  }

  // The answer, or null after showing in its place what is wrong with the filter.
  async function filtered(ask) {
    const field = byId("where");
    try {
      const answer = await ask();
      byId("where-error").textContent = "";
      field.removeAttribute("aria-invalid");
      return answer;
    } catch (error) {
      if (error.status !== 422 || !where()) throw error;
      byId("where-error").textContent = error.message;
      field.setAttribute("aria-invalid", "true");
      return null;
    }
  }

  async function browse(offset) {
    const classNames = chosen.length ? chosen : [null];
    const pages = await attempt(() =>
      filtered(() => Promise.all(classNames.map((one) => api.images({ class_name: one?.name, order: "mixed", offset, limit: PAGE, where: where() })))),
    );
    if (!pages || query !== null) return;
    const total = pages.reduce((sum, page) => sum + page.total, 0);
    const cards = pages.flatMap((page) => page.images.map((image) => card(image)));
    if (offset) byId("grid").append(...cards);
    else showGrid(cards, "Images of the index", `${total.toLocaleString("en")} images: click one to search by it`, where() ? "No image passes the filter." : "The index is empty: pfml index RUN FOLDER adds images.");
    const shown = byId("grid").children.length;
    byId("more").hidden = shown >= total || cards.length === 0;
    byId("more").onclick = () => browse(offset + PAGE);
  }

  // The same query and filter again, by the names that classes have now.
  async function changed(renamed) {
    fillNames();
    const names = new Set(chosen.map((one) => (one.name === renamed?.from ? renamed.to : one.name)));
    chosen = classes.filter((one) => one.images && names.has(one.name));
    fillColumns();
    if (query) {
      for (const item of [...query.like, ...query.unlike].filter((one) => one.image)) {
        item.image = await api.image(item.image.id).catch(() => null); // null if it was deleted
      }
      for (const list of ["like", "unlike"]) query[list] = query[list].filter((item) => item.image || item.file);
      if (!query.like.length) query = null;
      showQuery();
    }
    showChips();
  }

  function byImage(image) {
    replaceQuery({ like: [{ image }], unlike: [] });
    scrollTo({ top: 0, behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
  }

  function byFile(file, isMore = false) {
    if (file.size > status.most_upload_bytes) {
      const limit = (status.most_upload_bytes / 2 ** 20).toFixed(0);
      return toast(`An image must have at most ${limit} MiB, got ${(file.size / 2 ** 20).toFixed(1)} MiB.`);
    }
    const item = { file, whole: URL.createObjectURL(file) };
    if (isMore) addItem("like", item);
    else replaceQuery({ like: [item], unlike: [] });
  }

  function clear() {
    byId("file").value = byId("add-file").value = "";
    replaceQuery(null);
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

  // The columns that a filter can name, and an example of one.
  async function fillColumns() {
    const columns = await attempt(api.columns);
    if (!columns) return;
    describe(byId("where-columns"), columns.map((one) => [one.name, [one.type, one.examples.length ? `such as ${one.examples.join("; ")}` : null].filter(Boolean).join(", ")]));
    const sample = columns.find((one) => one.examples.length && one.type !== "list");
    byId("where").placeholder = sample ? `${sample.name} = '${sample.examples[0]}'` : "class = 'a class'";
  }

  fillNames();
  fillColumns();
  byId("where").addEventListener("change", search);
  byId("combine").addEventListener("change", search);
  byId("query-crop").addEventListener("click", cropQuery);
  byId("add-file").addEventListener("change", (event) => event.target.files[0] && byFile(event.target.files[0], true));
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
  byId("query-delete").addEventListener("click", () => edits.deleteImages([only().image.id]));
  byId("edit-class").addEventListener("click", () => openClass(chosen[0].name));
  byId("query-why").addEventListener("click", () => {
    const item = only();
    if (item?.image) showWhy({ id: item.image.id }, item.image.name, byImage);
    else if (item?.upload) showWhy({ upload: item.upload }, nameOf(item), byImage, shownUrl(item));
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
