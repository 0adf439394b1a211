// A part of an image, drawn by mouse or touch, or set by its edges.

const byId = (id) => document.getElementById(id);
const [dialog, surface, shown, box] = ["crop", "crop-surface", "crop-image", "crop-box"].map(byId);
const edges = ["left", "top", "right", "bottom"].map((name) => byId(`crop-${name}`));
const SMALLEST = 0.02;
let part = [0, 0, 1, 1]; // x, y, width, height in fractions
let start = null; // where the pointer went down

function show(values) {
  part = values;
  const [x, y, width, height] = part;
  for (const [name, value] of Object.entries({ left: x, top: y, width, height })) box.style.setProperty(`--${name}`, `${100 * value}%`);
  [x, y, x + width, y + height].forEach((value, k) => (edges[k].value = Math.round(100 * value)));
}

function place(event) {
  const { left, top, width, height } = shown.getBoundingClientRect();
  const within = (value) => Math.min(1, Math.max(0, value));
  return [within((event.clientX - left) / width), within((event.clientY - top) / height)];
}

function between([x, y], [u, v]) {
  const [left, top] = [Math.min(x, u), Math.min(y, v)];
  return [left, top, Math.abs(x - u), Math.abs(y - v)];
}

surface.addEventListener("pointerdown", (event) => {
  event.preventDefault();
  surface.setPointerCapture(event.pointerId);
  start = place(event);
});
surface.addEventListener("pointermove", (event) => start && show(between(start, place(event))));
for (const name of ["pointerup", "pointercancel"]) {
  surface.addEventListener(name, () => {
    if (start && (part[2] < SMALLEST || part[3] < SMALLEST)) show([0, 0, 1, 1]); // a click draws nothing
    start = null;
  });
}
for (const edge of edges) {
  edge.addEventListener("change", () => {
    const [left, top, right, bottom] = edges.map((one) => Math.min(100, Math.max(0, Number(one.value))) / 100);
    const ends = (first, last) => (last - first >= SMALLEST ? [first, last - first] : [Math.min(first, 1 - SMALLEST), SMALLEST]);
    const [[x, width], [y, height]] = [ends(left, right), ends(top, bottom)];
    show([x, y, width, height]);
  });
}
dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());

// The part that is chosen, [x, y, width, height]; null for the whole image, undefined if nothing is to change.
export function chooseCrop(address, name, before) {
  shown.src = address;
  shown.alt = name;
  show(before ?? [0, 0, 1, 1]);
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener(
      "close",
      () => {
        const isWhole = dialog.returnValue === "whole" || (part[2] > 0.995 && part[3] > 0.995);
        resolve(dialog.returnValue === "" ? undefined : isWhole ? null : part);
      },
      { once: true },
    );
  });
}

// The address of an image of a part; the caller revokes it.
export async function cropPreview(address, [x, y, width, height]) {
  const image = new Image();
  image.src = address;
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [Math.max(1, width * image.naturalWidth), Math.max(1, height * image.naturalHeight)];
  canvas.getContext("2d").drawImage(image, x * image.naturalWidth, y * image.naturalHeight, canvas.width, canvas.height, 0, 0, canvas.width, canvas.height);
  return URL.createObjectURL(await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.9)));
}
