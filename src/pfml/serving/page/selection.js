// The images that are selected on the map: shown as a strip; tagged, relabeled, left out, saved as a table.

import { api, attempt, element, indexedImage } from "/page/api.js";
import { ask } from "/page/ask.js";

const byId = (id) => document.getElementById(id);
const STRIP = 24; // images that are shown
const MOST = 20000; // that one change may concern
const LONGEST_NAME = 200;
const counted = (count) => `${count.toLocaleString("en")} ${count === 1 ? "image" : "images"}`;

// The selected images; `changed` is called when there are others.
export function selecting({ edits, classes, changed }) {
  const ids = new Set();

  function show() {
    const tooMany = ids.size > MOST;
    byId("map-selection").hidden = !ids.size;
    byId("map-selected").textContent = `${counted(ids.size)} selected${tooMany ? `: at most ${MOST.toLocaleString("en")} can be changed at once` : ""}`;
    for (const name of ["map-tag", "map-relabel", "map-leave-out", "map-save"]) byId(name).disabled = tooMany;
    const some = [...ids].slice(0, STRIP);
    byId("map-strip").replaceChildren(...some.map((id) => element("li", {}, indexedImage(id, `Selected image ${id}`))));
    changed();
  }

  function take(found, how) {
    if (how === "only") ids.clear();
    for (const id of found) {
      if (how === "remove") ids.delete(id);
      else ids.add(id);
    }
    show();
  }

  const check = (text) => (text.length > LONGEST_NAME ? { ok: false, warns: true, hint: `At most ${LONGEST_NAME} characters.` } : { ok: text.length > 0 });

  async function tag() {
    const tags = (await attempt(() => api.tags())) ?? [];
    const text = "A tag is a word of your own: search by it with the filter tags contains 'WORD', or color the map by it.";
    const chosen = await ask({ title: `Tag ${counted(ids.size)}`, text, verb: "Tag", label: "Tag", names: tags, check });
    if (chosen) await edits.make({ kind: "tag", images: [...ids], tag: chosen });
  }

  async function relabel() {
    const names = classes.filter((one) => one.images).map((one) => one.name);
    const isThere = (text) => names.includes(text);
    const into = await ask({
      title: `Relabel ${counted(ids.size)}`,
      text: "They keep this class when their folder is indexed again, and training takes it from the index.",
      verb: "Relabel",
      label: "Class",
      names,
      check: (text) => (text && !isThere(text) ? { ...check(text), hint: `${text} is a new class.` } : check(text)),
    });
    if (into) await edits.make({ kind: "relabel", images: [...ids], into });
  }

  // The table of the images, as a file that the browser saves.
  async function save() {
    const table = await attempt(() => api.table([...ids]));
    if (!table) return;
    const link = element("a", { href: URL.createObjectURL(table), download: "selection.csv" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  byId("map-tag").addEventListener("click", tag);
  byId("map-relabel").addEventListener("click", relabel);
  byId("map-leave-out").addEventListener("click", () => edits.deleteImages([...ids]));
  byId("map-save").addEventListener("click", save);
  byId("map-unselect").addEventListener("click", () => take([], "only"));
  return {
    ids,
    take,
    toggle: (id) => take([id], ids.has(id) ? "remove" : "add"),
    clear: () => take([], "only"),
    // Only these are still there.
    keep: (there) => [...ids].some((id) => !there.has(id)) && take([...ids].filter((id) => !there.has(id)), "remove"),
  };
}
