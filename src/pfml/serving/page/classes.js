// The classes of the index: one at a time with its images; rename, merge, delete; pairs that may be one; all changes.

import { api, attempt, breakable, element, fileName, indexedImage, isElsewhere, percent } from "/page/api.js";

const byId = (id) => document.getElementById(id);
const PAGE = 48;
const EXAMPLES = 5; // images of each class of a pair
const LISTED = 200; // of more classes the first: the field above finds the others
const number = (count, one, many) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;

export function start({ classes, edits, searchByImage }) {
  let name = null; // of the class that is shown
  let shownImages = [];
  let similar = [];
  let asking = new AbortController();
  let pair = 0;
  let isSwapped = false;
  let changes = [];
  let lastChange = Promise.resolve();
  const chosen = new Set(); // ids of images

  const indexed = () => classes.filter((one) => one.images);
  const current = () => classes.find((one) => one.name === name);

  function listed() {
    const text = byId("classes-find").value.trim().toLowerCase();
    return indexed().filter((one) => one.name.toLowerCase().includes(text));
  }

  function showList() {
    const found = listed();
    const rows = found.slice(0, LISTED).map((one) =>
      element(
        "li",
        {},
        element(
          "button",
          { class: "queued", "aria-current": one.name === name ? "true" : null, onclick: () => open(one.name) },
          one.example === null ? element("span", { class: "mini missing" }, "?") : indexedImage(one.example, ""),
          element("span", { class: "queued-text" }, element("span", {}, one.name), element("span", { class: "quiet" }, number(one.images, "image", "images"))),
        ),
      ),
    );
    byId("classes-list").replaceChildren(...rows);
    byId("classes-progress").textContent =
      found.length > LISTED ? `${LISTED} of ${number(found.length, "class", "classes")}: type to find one` : number(found.length, "class", "classes");
    const row = byId("classes-list").querySelector("[aria-current]");
    const list = byId("classes-list");
    if (row) {
      list.scrollTop = row.offsetTop - list.offsetTop - list.clientHeight / 2;
      list.scrollLeft = row.offsetLeft - list.offsetLeft - list.clientWidth / 4; // on a narrow page it is a row
    }
  }

  function showSelection() {
    byId("class-selection").hidden = !chosen.size;
    byId("class-chosen").textContent = number(chosen.size, "image selected", "images selected");
    for (const card of byId("class-images").children) card.classList.toggle("is-chosen", chosen.has(Number(card.dataset.id)));
  }

  function toggle(id, isOn) {
    if (isOn) chosen.add(id);
    else chosen.delete(id);
    showSelection();
  }

  function card(image) {
    const text = fileName(image.name);
    return element(
      "li",
      { class: "card", "data-id": image.id },
      element(
        "button",
        { class: "card-main", title: image.name, "aria-label": `Search by ${text}`, onclick: () => searchByImage(image) },
        indexedImage(image.id, ""),
        element("span", { class: "card-name" }, text),
      ),
      element(
        "label",
        { class: "pick" },
        element("input", { type: "checkbox", "aria-label": `Select ${text}`, checked: chosen.has(image.id), onchange: (event) => toggle(image.id, event.target.checked) }),
      ),
    );
  }

  async function showImages(offset) {
    const asked = name;
    const page = await attempt(() => api.images({ class_name: asked, offset, limit: PAGE }));
    if (!page || asked !== name) return;
    shownImages = offset ? [...shownImages, ...page.images] : page.images;
    byId("class-images").replaceChildren(...shownImages.map(card));
    byId("class-more").hidden = shownImages.length >= page.total || !page.images.length;
    byId("class-more").onclick = () => showImages(shownImages.length);
    showSelection();
  }

  function showClass() {
    const one = current();
    byId("class-panel").hidden = !one;
    if (!one) return;
    byId("class-title").replaceChildren(...breakable(one.name));
    const facts = [number(one.images, "image", "images")];
    if (one.trained) facts.push("trained on");
    const before = one.given.filter((each) => each !== one.name);
    if (before.length) facts.push(`${one.given.includes(one.name) ? "with" : "formerly"} ${before.join(", ")}`);
    byId("class-facts").textContent = facts.join(" · ");
    byId("class-merge").disabled = indexed().length < 2;
    showImages(0);
  }

  function open(asked) {
    chosen.clear();
    name = asked;
    showList();
    showClass();
  }

  function step(by) {
    const names = listed().map((one) => one.name);
    if (names.length) open(names[Math.max(0, Math.min(names.length - 1, names.indexOf(name) + by))]);
  }

  // The pair with the class that goes first; the smaller one, unless it is swapped.
  function shownPair() {
    const one = similar[pair];
    const order = isSwapped ? [1, 0] : [0, 1];
    const names = [one.class_name, one.into];
    return order.map((k) => ({ name: names[k], images: one.images[k], example: one.examples[k] }));
  }

  // A class of the pair: the image that the audit took for typical, and a few more.
  function side(one) {
    const mosaic = element("span", { class: "mosaic" }, one.example === null ? null : indexedImage(one.example, "", "large"));
    const made = element(
      "button",
      { class: "side", "aria-label": `Show ${one.name}`, disabled: !one.images, onclick: () => open(one.name) },
      mosaic,
      element("strong", { class: "break" }, ...breakable(one.name)),
      element("span", { class: "quiet" }, one.images ? number(one.images, "image", "images") : "not in the index"),
    );
    const more = async () => {
      const page = await attempt(() => api.images({ class_name: one.name, limit: EXAMPLES }, { signal: asking.signal }));
      const others = (page?.images ?? []).filter((image) => image.id !== one.example);
      mosaic.append(...others.slice(0, EXAMPLES - mosaic.children.length).map((image) => indexedImage(image.id, "")));
    };
    if (one.images) more();
    return made;
  }

  // Images that were asked for belong to pairs as they were.
  function forgetAsked() {
    asking.abort();
    asking = new AbortController();
  }

  function showSimilar() {
    forgetAsked();
    const count = byId("classes-count");
    count.hidden = !similar.length;
    count.textContent = similar.length;
    byId("similar").hidden = !similar.length;
    if (!similar.length) return;
    pair = Math.min(pair, similar.length - 1);
    const [from, into] = shownPair();
    byId("similar-note").textContent = `${pair + 1} of ${similar.length} · their images are mixed ${percent(similar[pair].share, 0)} as much as those of one class`;
    byId("similar-pair").replaceChildren(side(from), element("span", { class: "arrow", "aria-hidden": "true" }, "→"), side(into));
    byId("similar-merge-text").textContent = `Merge ${from.name} into ${into.name}`;
    byId("similar-merge").disabled = !from.images || !into.images;
    byId("similar-next").hidden = similar.length < 2;
  }

  function nextPair(by) {
    pair = (pair + by + similar.length) % similar.length;
    isSwapped = false;
    showSimilar();
  }

  function swap() {
    isSwapped = !isSwapped;
    showSimilar();
  }

  // One change after the other: a second press must not merge what the first one has merged.
  const inTurn = (task) => (lastChange = lastChange.then(task, task));

  function mergePair() {
    if (!similar.length || byId("similar-merge").disabled) return null;
    const [from, into] = shownPair();
    return inTurn(async () => {
      if (!similar.some((one) => [one.class_name, one.into].includes(from.name) && [one.class_name, one.into].includes(into.name))) return;
      isSwapped = false;
      forgetAsked(); // a class that is merged has none
      if (!(await edits.make({ kind: "merge", class_name: from.name, into: into.name }))) {
        showSimilar();
        return;
      }
      similar = similar.filter((one) => ![one.class_name, one.into].includes(from.name)); // before the server is asked again
      open(into.name);
    });
  }

  function showChanges() {
    byId("changes").hidden = !changes.length;
    byId("changes-count").textContent = changes.length;
    byId("changes-list").replaceChildren(
      ...changes.map((one) => {
        const options = { class: "small ghost", "aria-label": `Undo: ${one.text}`, disabled: Boolean(one.blocked_by), title: one.blocked_by && `Undo first: ${one.blocked_by}`, onclick: () => edits.undo(one) };
        return element("li", {}, element("span", { class: "break" }, edits.sentence(one.text)), element("button", options, "Undo"));
      }),
    );
  }

  function undoLast() {
    return inTurn(async () => {
      if (changes.length) await edits.undo(changes[0]);
    });
  }

  async function load() {
    const some = indexed();
    byId("classes-empty").hidden = some.length > 0;
    byId("classes-empty").textContent = "No image of the index has a class: pfml index RUN FOLDER takes them from the folders.";
    if (!current()?.images) name = some[0]?.name ?? null;
    showList();
    showClass();
    const [pairs, made] = await Promise.all([attempt(() => api.similar()), attempt(() => api.edits())]);
    similar = pairs ?? [];
    changes = made ?? [];
    byId("classes-body").hidden = !some.length && !changes.length;
    showSimilar();
    showChanges();
  }

  // The class that is shown stays, also under another name.
  async function changed(renamed) {
    if (renamed?.from === name) name = renamed.to;
    chosen.clear();
    showSelection();
    await load();
  }

  async function removeClass() {
    const names = listed().map((one) => one.name);
    const next = names[names.indexOf(name) + 1] ?? names[names.indexOf(name) - 1];
    if ((await edits.deleteClass(name)) && next) open(next);
  }

  const removeChosen = () => edits.deleteImages([...chosen]);

  function onKey(event) {
    if (!current()?.images || isElsewhere(event, "view-classes")) return;
    const actions = {
      r: () => edits.rename(name),
      i: () => !byId("class-merge").disabled && edits.merge(name),
      d: () => (chosen.size ? removeChosen() : removeClass()),
      u: undoLast,
      j: () => step(1),
      k: () => step(-1),
      m: mergePair,
      s: () => similar.length && swap(),
      n: () => similar.length && nextPair(1),
    };
    const action = actions[event.key.toLowerCase()];
    if (!action) return;
    event.preventDefault();
    action();
  }

  byId("classes-find").addEventListener("input", showList);
  byId("classes-find").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && listed().length) open(listed()[0].name);
    if (event.key === "Escape") event.target.blur();
  });
  byId("class-rename").addEventListener("click", () => edits.rename(name));
  byId("class-merge").addEventListener("click", () => edits.merge(name));
  byId("class-delete").addEventListener("click", removeClass);
  byId("class-delete-chosen").addEventListener("click", removeChosen);
  byId("class-unselect").addEventListener("click", () => {
    chosen.clear();
    byId("class-images").replaceChildren(...shownImages.map(card));
    showSelection();
  });
  byId("similar-merge").addEventListener("click", mergePair);
  byId("similar-swap").addEventListener("click", swap);
  byId("similar-next").addEventListener("click", () => nextPair(1));
  document.addEventListener("keydown", onKey);

  return { open, changed, shown: (first) => first && load() };
}
