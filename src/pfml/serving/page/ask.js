// A question in a dialog: what will happen, a field if one is needed, and a button that does it.

import { element } from "/page/api.js";

const byId = (id) => document.getElementById(id);
const dialog = byId("ask");
let last = Promise.resolve(); // the answer to the question before

// What is answered, or null if nothing is to happen. `check` says of the field's text whether it will do: {ok, verb, hint, warns}.
export async function ask({ title, text, verb, danger = false, label = null, value = "", names = [], check = null }) {
  await last; // a dialog is closed a moment before it says so
  const [input, submit] = [byId("ask-input"), byId("ask-do")];
  byId("ask-title").textContent = title;
  byId("ask-text").textContent = text;
  byId("ask-text").hidden = !text;
  byId("ask-field").hidden = label === null;
  byId("ask-label").textContent = label ?? "";
  byId("ask-names").replaceChildren(...names.map((name) => element("option", { value: name })));
  input.value = value;
  input.required = label !== null;
  submit.classList.toggle("danger", danger);

  const show = () => {
    const found = check ? check(input.value.trim()) : { ok: true };
    submit.disabled = !found.ok;
    submit.textContent = found.verb ?? verb;
    byId("ask-hint").textContent = found.hint ?? "";
    byId("ask-hint").classList.toggle("warns", Boolean(found.warns));
  };
  show();
  input.oninput = show;
  dialog.returnValue = "";
  dialog.showModal();
  if (label === null) byId("ask-cancel").focus(); // Enter alone deletes nothing
  else input.select();
  last = new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "do" ? input.value.trim() || true : null), { once: true });
  });
  return last;
}

byId("ask-cancel").addEventListener("click", () => dialog.close());
dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
