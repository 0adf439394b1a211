// "Why is this image here?": the terms of the potential, strongest first, and the sum of the rest.

import { api, attempt, element, fileName, imageUrl, indexedImage, percent, readable } from "/page/api.js";

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
    element("span", { class: "quiet" }, `at ${source.distance.toFixed(3)} · ${fileName(source.name)}`),
  );
  return element("li", {}, shown, text, bar(source.share, largest), element("span", { class: "share" }, percent(Math.abs(source.share))));
}

function restRow(group, what) {
  const text = element("span", { class: "source-text quiet" }, `${group.count.toLocaleString("en")} ${group.potential ? `others that ${what}` : "others, out of reach"}`);
  return element("li", { class: "rest" }, element("span", { class: "mini" }), text, element("span"), element("span", { class: "share" }, percent(Math.abs(group.share))));
}

function list(title, sources, group, what, largest, searchBy) {
  const rows = sources.map((source) => row(source, largest, searchBy));
  if (group.count) rows.push(restRow(group, what));
  if (!rows.length) rows.push(element("li", { class: "quiet" }, "none"));
  const sum = sources.reduce((total, one) => total + one.share, 0) + group.share;
  return element(
    "section",
    {},
    element("h3", {}, title, element("span", { class: "share" }, percent(Math.abs(sum)))),
    element("ul", { class: "sources" }, ...rows),
  );
}

// What holds the image where it is, in words.
function sentence(answer) {
  const [strongest] = answer.classes;
  const own = answer.classes.find((one) => one.class_name === answer.class_name);
  const parts = [`${percent(strongest.share, 0)} of all pull on this image comes from ${strongest.class_name}.`];
  if (strongest.class_name !== answer.class_name) {
    parts.push(own ? `${own.class_name} pulls with ${percent(own.share, 0)}.` : `${answer.class_name} pulls less than the first five classes.`);
  }
  const [first, last] = [answer.attracting[0], answer.attracting.at(-1)];
  if (answer.attracting.length > 1 && Math.abs(first.share - last.share) < 0.02 * Math.abs(first.share)) {
    parts.push(`The nearest ${answer.attracting.length} of ${answer.class_name} pull equally: within the contact distance of the law the pull no longer grows.`);
  }
  return element("p", { class: "why-sentence" }, parts.join(" "));
}

function leftOutNote(count, isIndexed) {
  if (!count) return null;
  const subject = count === 1 ? "indexed image is a duplicate" : "indexed images are duplicates";
  return element("p", { class: "why-left-out quiet" }, `${count === 1 ? "One" : count} ${isIndexed ? "other " : ""}${subject} of this image: left out.`);
}

function classPicker(answer, ask) {
  const options = answer.classes.map((one) => one.class_name);
  if (!options.includes(answer.class_name)) options.unshift(answer.class_name);
  const select = element("select", { "aria-label": "Class that it is taken for", onchange: (event) => ask(event.target.value) });
  for (const name of options) {
    const pull = answer.classes.find((one) => one.class_name === name);
    const text = pull ? `${name} (${percent(pull.share)} of the pull)` : name;
    select.append(element("option", { value: name, selected: name === answer.class_name }, text));
  }
  return select;
}

export async function showWhy(which, name, searchBy, preview = null) {
  const ask = async (className) => {
    const answer = await attempt(() => api.why({ ...which, class_name: className }));
    if (!answer) return;
    const shown = element("img", { class: "why-image", src: preview ?? imageUrl(which.id, "large"), alt: name });
    const leftOut = leftOutNote(answer.left_out, which.id !== undefined);
    // one scale for both lists: bars of equal length are equal terms
    const largest = Math.max(...[...answer.attracting, ...answer.repelling].map((one) => Math.abs(one.share)), 1e-12);
    body.replaceChildren(
      element("div", { class: "why-top" }, shown, element("div", {}, sentence(answer), element("p", { class: "break quiet" }, name), element("label", { class: "quiet" }, "As an image of ", classPicker(answer, ask)), leftOut)),
      element(
        "div",
        { class: "why-lists" },
        list(`Pull: ${answer.class_name}`, answer.attracting, answer.other_attracting, "pull", largest, searchBy),
        list("Push: other classes", answer.repelling, answer.other_repelling, "push", largest, searchBy),
      ),
      element(
        "details",
        { class: "quiet small-print" },
        element("summary", {}, "How this is computed"),
        element("p", { class: "why-total" }, `Per cents are shares of all terms, pull and push together. Pull is negative in the potential of ${answer.class_name}: Ψ = ${answer.total.toPrecision(4).replace("-", "−")}, ${percent(answer.total_share).replace("-", "−")} of all terms.`),
        element("p", {}, `Fields superpose, so the terms are exact: they add up to Ψ. The charges are the indexed images and the proxies of the run, without the image itself. Law: ${answer.law}. Charges out of reach add a constant of ${answer.constant.toPrecision(4)} to Eq. 3, which exerts no force.`),
      ),
    );
    if (!dialog.open) dialog.showModal();
    dialog.dataset.ready = "yes";
  };
  delete dialog.dataset.ready;
  await ask(null);
}

dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
