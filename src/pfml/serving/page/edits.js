// Edits of the index: rename, merge and delete a class, delete images; each with Undo in its toast.

import { api, attempt, toast } from "/page/api.js";
import { ask } from "/page/ask.js";

const LONGEST_NAME = 200;
const images = (count) => `${count.toLocaleString("en")} ${count === 1 ? "image" : "images"}`;
const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}.`;

// The class that images of another one are in after an edit, or before it was undone: {from, to}; null if none.
const renaming = (edit) => (edit.into ? { from: edit.class_name, to: edit.into } : null);
const reversed = (edit) => (edit.kind === "rename" ? { from: edit.into, to: edit.class_name } : null);

// What views call; `classes` are those of the index, and `changed` shows all views again.
export function editing(classes, changed) {
  const found = (name) => classes.find((one) => one.name === name && one.images);
  const toasts = new Map(); // number of an edit -> its toast
  let pending = 0;
  const others = (name) => classes.filter((one) => one.images && one.name !== name).map((one) => one.name);

  // Makes or undoes an edit, with no poll of the index in between. What had the focus may be gone after it.
  async function inOne(task) {
    pending += 1;
    try {
      return await task();
    } finally {
      pending -= 1;
      const here = document.activeElement;
      const isGone = here === document.body || !here.getClientRects().length;
      if (isGone) document.querySelector('[role="tab"][aria-selected="true"]').focus({ preventScroll: true });
    }
  }

  const make = (edit) =>
    inOne(async () => {
      const done = await attempt(() => api.edit(edit));
      if (!done) return null;
      toasts.set(done.number, toast(sentence(done.text), "good", { label: "Undo", run: () => undo(done) }));
      await changed(renaming(done));
      return done;
    });

  const undo = (edit) =>
    inOne(async () => {
      const answer = await attempt(() => api.undo(edit.number));
      if (!answer) return;
      toasts.get(edit.number)?.remove();
      const back = answer.missing ? ` ${images(answer.missing)} return when pfml index is run again.` : "";
      toast(`Undone: ${answer.text}.${back}`, "good");
      await changed(reversed(edit));
    });

  async function rename(name) {
    const check = (text) => {
      if (!text || text === name) return { ok: false };
      if (text.length > LONGEST_NAME) return { ok: false, warns: true, hint: `At most ${LONGEST_NAME} characters.` };
      const there = found(text);
      if (!there) return { ok: true };
      return { ok: true, verb: "Merge", warns: true, hint: `${text} is a class already, with ${images(there.images)}: ${name} becomes part of it.` };
    };
    const into = await ask({ title: `Rename ${name}`, text: "", verb: "Rename", label: "New name", value: name, check });
    return into && make({ kind: found(into) ? "merge" : "rename", class_name: name, into });
  }

  async function merge(name) {
    const check = (text) => {
      const there = text === name ? null : found(text);
      return there
        ? { ok: true, hint: `${images(found(name).images)} of ${name} join ${images(there.images)} of ${text}.` }
        : { ok: false, warns: true, hint: text && text !== name ? "No class of the index has this name." : "" };
    };
    const into = await ask({ title: `Merge ${name} into another class`, text: "", verb: "Merge", label: "Into", names: others(name), check });
    return into && make({ kind: "merge", class_name: name, into });
  }

  async function deleteClass(name) {
    const text = `${images(found(name).images)} leave the index and are no longer found. They stay out when their folder is indexed again.`;
    const sure = await ask({ title: `Delete ${name}?`, text, verb: "Delete class", danger: true });
    return sure && make({ kind: "delete", class_name: name });
  }

  async function deleteImages(ids) {
    const one = ids.length === 1;
    const text = `${one ? "It leaves" : "They leave"} the index, and ${one ? "stays" : "stay"} out when ${one ? "its" : "their"} folder is indexed again.`;
    const sure = await ask({ title: `Delete ${images(ids.length)}?`, text, verb: `Delete ${images(ids.length)}`, danger: true });
    return sure && make({ kind: "leave_out", images: ids });
  }

  return { make, undo, rename, merge, deleteClass, deleteImages, sentence, isPending: () => pending > 0 };
}
