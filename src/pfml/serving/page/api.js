// Requests, and helpers of all views. Text from the server only ever becomes textContent.

let pending = 0;

// The JSON of a response, or its bytes (as: "blob"); an error of the server is thrown with its message.
export async function request(path, options = {}) {
  const progress = document.getElementById("progress");
  pending += 1;
  if (progress && !options.quiet) progress.hidden = false;
  try {
    const response = await fetch(path, options);
    if (response.status === 401) {
      location.assign("/login");
      throw new Error("Log in first.");
    }
    if (response.status === 204) return null;
    if (response.ok && options.as === "blob") return await response.blob();
    const body = await response.json();
    if (!response.ok) throw Object.assign(new Error(body.error ?? `The server answered ${response.status}.`), { status: response.status });
    return body;
  } catch (error) {
    if (error instanceof TypeError) throw new Error("The server does not answer: is pfml serve still running?");
    throw error;
  } finally {
    pending -= 1;
    if (progress && pending === 0) progress.hidden = true;
  }
}

// A query string; lists repeat their name, and empty values are left out.
export function query(values) {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined && one !== "") parameters.append(name, one);
    }
  }
  return parameters.toString();
}

export const api = {
  status: (options) => request("/api/status", options),
  // A server that is not ready describes its problem, too: the status is no error here.
  ready: () => fetch("/ready").then((response) => response.json()),
  classes: () => request("/api/classes"),
  images: (values, options) => request(`/api/images?${query(values)}`, options),
  why: (values) => request(`/api/why?${query(values)}`),
  map: () => request("/api/map", { quiet: true }),
  mapValues: (column) => request(`/api/map/values?${query({ column })}`),
  potential: (className) => request(`/api/map/potential?${query({ class_name: className })}`),
  image: (id) => request(`/api/images/${id}`),
  similar: () => request("/api/classes/similar"),
  edits: () => request("/api/edits"),
  edit: (values) => request("/api/edits", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(values) }),
  tags: () => request("/api/tags"),
  table: (images) => request("/api/images/table", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ images }), as: "blob" }),
  undo: (number) => request(`/api/edits/${number}`, { method: "DELETE" }),
  audit: () => request("/api/audit"),
  copies: () => request("/api/audit/copies"),
  suspect: (key) => request(`/api/audit/${encodeURIComponent(key)}`),
  withdraw: (key) => request(`/api/audit/${encodeURIComponent(key)}`, { method: "DELETE" }),
  decide: (key, decision, label = "") =>
    request(`/api/audit/${encodeURIComponent(key)}`, {
      method: "PUT",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ decision, label }),
    }),
  columns: () => request("/api/columns"),
  query: (values, options) => request("/api/query", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(values), ...options }),
  // The key of an image, or of a part of it ([x, y, width, height] in fractions), for queries.
  upload(file, crop, options) {
    const form = new FormData();
    form.append("file", file, "upload");
    if (crop) form.append("crop", crop.join(","));
    return request("/api/uploads", { method: "POST", body: form, ...options }).then((answer) => answer.upload);
  },
};

export const imageUrl = (id, size = "thumbnail") => `/api/images/${id}/jpeg?size=${size}`;

// An element with properties, listeners (on...), attributes (the rest) and children; strings become text.
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// An indexed image; if its file is missing, a gray box that says so.
export function indexedImage(id, text, size = "thumbnail") {
  const image = element("img", { src: imageUrl(id, size), alt: text, loading: "lazy", decoding: "async" });
  image.addEventListener("error", () => {
    const missing = element("span", { class: "missing", role: "img", "aria-label": `${text}: file missing` }, "file missing");
    image.replaceWith(missing);
  });
  return image;
}

// Messages belong to the view that they came up on.
export function clearToasts() {
  document.getElementById("toasts").replaceChildren();
}

// A message that goes by itself, later if it offers an action ({label, run}), and not while somebody is at it.
export function toast(message, kind = "error", action = null) {
  const toasts = document.getElementById("toasts");
  const made = element("div", { class: `toast ${kind}` }, element("span", {}, message));
  const act = () => {
    made.remove();
    action.run();
  };
  if (action) made.append(element("button", { class: "toast-action", onclick: act }, action.label));
  made.append(element("button", { "aria-label": "Dismiss", onclick: () => made.remove() }, "✕"));
  toasts.append(made);
  while (toasts.children.length > 3) toasts.firstChild.remove();
  const seconds = action ? 12 : kind === "error" ? 8 : 3;
  const leave = () => (made.matches(":hover, :focus-within") ? setTimeout(leave, 2000) : made.remove());
  setTimeout(leave, 1000 * seconds);
  return made;
}

// The result of a task, or null after showing its error as a toast; a request that a newer one replaced shows none.
export async function attempt(task) {
  try {
    return await task();
  } catch (error) {
    if (error.name !== "AbortError") toast(error.message);
    return null;
  }
}

// Whether a key is not for a view: it is hidden, somebody types, or the browser has the key.
export function isElsewhere(event, view) {
  const isTyping = event.target.matches('input:not([type="checkbox"]), select, textarea') || document.querySelector("dialog[open]");
  return document.getElementById(view).hidden || event.ctrlKey || event.metaKey || event.altKey || isTyping;
}

// A name that may break where its words end.
export const breakable = (name) => name.split(/(?<=[_./-])/).flatMap((part) => [part, element("wbr")]).slice(0, -1);

export const fileName = (name) => name.split("/").pop();
export const readable = (className) => className || "no class";
export const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)} %`;
export const signed = (value, digits = 1) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(digits)}`;

// A color for each class, far from those of its neighbors in the list.
export function classColor(label, alpha = 1) {
  if (label < 0) return `rgba(128, 128, 128, ${alpha})`;
  const hue = (label * 137.508 + 210) % 360;
  const light = [52, 42, 62][label % 3];
  return `hsla(${hue}, 62%, ${light}%, ${alpha})`;
}
