// "Why is this image here?": the terms of the potential, strongest first, and the sum of the rest.

import { api, attempt, element, imageUrl, indexedImage, percent, readable, signed } from "/page/api.js";

const dialog = document.getElementById("why");
const body = document.getElementById("why-body");

function bar(share, largest) {
  const length = `${Math.min(100, (100 * Math.abs(share)) / (largest || 1))}%`;
  const made = element("span", { class: `bar ${share < 0 ? "pull" : "push"}`, "aria-hidden": "true" });
  made.style.setProperty("--length", length);
  return made;
}

function row(source, largest, searchBy) {
  const isImage = source.kind === "image";
  const shown = isImage
    ? element(
        "button",
        {
          class: "mini",
          "aria-label": `Search by ${source.name}`,
          onclick: () => {
            dialog.close();
            searchBy({ id: source.id, name: source.name, class_name: source.class_name });
          },
        },
        indexedImage(source.id, source.name),
      )
    : element("span", { class: "mini star", role: "img", "aria-label": "proxy" }, "★");
  const text = element(
    "span",
    { class: "source-text" },
    element("span", {}, readable(source.class_name)),
    element("span", { class: "quiet" }, `at ${source.distance.toFixed(3)} · ${source.name.split("/").pop()}`),
  );
  return element("li", {}, shown, text, bar(source.share, largest), element("span", { class: "share" }, `${signed(100 * source.share)} %`));
}

function restRow(group, what) {
  const text = element("span", { class: "source-text quiet" }, `${group.count.toLocaleString("en")} ${group.potential ? `others that ${what}` : "others, out of reach"}`);
  return element("li", { class: "rest" }, element("span", { class: "mini" }), text, element("span"), element("span", { class: "share" }, `${signed(100 * group.share)} %`));
}

function list(title, sources, group, what, largest, searchBy) {
  const rows = sources.map((source) => row(source, largest, searchBy));
  if (group.count) rows.push(restRow(group, what));
  if (!rows.length) rows.push(element("li", { class: "quiet" }, "none"));
  const sum = sources.reduce((total, one) => total + one.share, 0) + group.share;
  return element(
    "section",
    {},
    element("h3", {}, title, element("span", { class: "share" }, `${signed(100 * sum)} %`)),
    element("ul", { class: "sources" }, ...rows),
  );
}

function leftOutNote(count, isIndexed) {
  if (!count) return null;
  const subject = count === 1 ? "indexed image is a duplicate" : "indexed images are duplicates";
  return element("p", { class: "why-left-out quiet" }, `${count === 1 ? "One" : count} ${isIndexed ? "other " : ""}${subject} of this image: left out.`);
}

function classPicker(answer, ask) {
  const options = answer.classes.map((one) => one.class_name);
  if (!options.includes(answer.class_name)) options.unshift(answer.class_name);
  const select = element("select", { "aria-label": "Class whose potential is shown", onchange: (event) => ask(event.target.value) });
  for (const name of options) {
    const pull = answer.classes.find((one) => one.class_name === name);
    const text = pull ? `${name} (${percent(pull.share)} of all attraction)` : name;
    select.append(element("option", { value: name, selected: name === answer.class_name }, text));
  }
  return select;
}

export async function showWhy(which, name, searchBy, preview = null) {
  const ask = async (className) => {
    const answer = await attempt(() => api.why({ ...which, class_name: className }));
    if (!answer) return;
    const shown = element("img", { class: "why-image", src: preview ?? imageUrl(which.id, "large"), alt: name });
    const total = element(
      "p",
      { class: "why-total" },
      element("strong", {}, `Ψ = ${answer.total.toPrecision(4).replace("-", "−")}`),
      element("span", { class: "quiet" }, ` attraction and repulsion together: ${signed(100 * answer.total_share)} % of all terms`),
    );
    const leftOut = leftOutNote(answer.left_out, which.id !== undefined);
    // one scale for both lists: bars of equal length are equal terms
    const largest = Math.max(...[...answer.attracting, ...answer.repelling].map((one) => Math.abs(one.share)), 1e-12);
    body.replaceChildren(
      element("div", { class: "why-top" }, shown, element("div", {}, element("p", { class: "break" }, name), element("label", { class: "quiet" }, "Potential of ", classPicker(answer, ask)), total, leftOut)),
      element(
        "div",
        { class: "why-lists" },
        list("Attract it", answer.attracting, answer.other_attracting, "attract", largest, searchBy),
        list("Repel it", answer.repelling, answer.other_repelling, "repel", largest, searchBy),
      ),
      element(
        "p",
        { class: "quiet small-print" },
        `Fields superpose, so these terms are exact: they add up to Ψ. The charges are the indexed images and the proxies of the run, without the image itself. Law: ${answer.law}. Charges out of reach add a constant of ${answer.constant.toPrecision(4)} to Eq. 3, which exerts no force.`,
      ),
    );
    if (!dialog.open) dialog.showModal();
    dialog.dataset.ready = "yes";
  };
  delete dialog.dataset.ready;
  await ask(null);
}

dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
