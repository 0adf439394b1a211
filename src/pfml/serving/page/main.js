// The views, their tabs, and what is served.

import { api, attempt } from "/page/api.js";
import { startAudit } from "/page/audit.js";
import { startMap } from "/page/map.js";
import { startSearch } from "/page/search.js";

const views = ["search", "map", "audit"];
const parts = {};
const started = new Set();

function show(name) {
  const chosen = views.includes(name) ? name : "search";
  for (const view of views) {
    const tab = document.getElementById(`tab-${view}`);
    document.getElementById(`view-${view}`).hidden = view !== chosen;
    tab.setAttribute("aria-selected", String(view === chosen));
    tab.tabIndex = view === chosen ? 0 : -1;
  }
  if (location.hash.slice(1) !== chosen) history.replaceState(null, "", `#${chosen}`);
  const first = !started.has(chosen);
  started.add(chosen);
  parts[chosen].shown(first);
}

const LOOK_EVERY = 10000; // milliseconds

// What is wrong with the files of the index, for as long as it is.
function showProblem(problem) {
  const place = document.getElementById("problem");
  place.hidden = !problem;
  if (place.textContent !== (problem ?? "")) place.textContent = problem ?? "";
}

async function watchIndex() {
  if (document.hidden) return;
  const answer = await api.ready().catch(() => null); // a server that is gone is told by what one does next
  if (answer && "problem" in answer) showProblem(answer.problem);
}

async function begin() {
  const [status, classes] = await Promise.all([api.status(), api.classes()]);
  document.title = `${status.run} · pfml`;
  document.getElementById("run-name").textContent = status.run;
  const count = (number, one, many) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
  // The threshold of the latest answer: pfml calibrate may find another one while the page is open.
  const showFacts = (threshold) => {
    const facts = [count(status.images, "image", "images"), count(status.classes, "class", "classes")];
    if (threshold) facts.push(`unknown beyond ${threshold.distance.toFixed(3)}`);
    document.getElementById("run-facts").textContent = facts.join(" · ");
  };
  showFacts(status.threshold);
  showProblem(status.problem);
  setInterval(watchIndex, LOOK_EVERY);
  document.addEventListener("visibilitychange", watchIndex);
  const context = { status, classes, show, showFacts };
  parts.search = startSearch(context);
  context.searchByImage = (image) => {
    show("search");
    parts.search.byImage(image);
  };
  parts.map = startMap(context);
  parts.audit = startAudit(context);
  for (const view of views) document.getElementById(`tab-${view}`).addEventListener("click", () => show(view));
  document.querySelector(".tabs").addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const here = views.indexOf(event.target.dataset.view);
    const next = views[(here + step + views.length) % views.length];
    show(next);
    document.getElementById(`tab-${next}`).focus();
  });
  addEventListener("hashchange", () => show(location.hash.slice(1)));
  show(location.hash.slice(1));
  document.body.dataset.ready = "yes";
}

attempt(begin);
