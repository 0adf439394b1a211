// The audit queue: one suspect at a time, with its neighbors; decisions are saved at once.

import { api, attempt, element, imageUrl, indexedImage, isElsewhere, percent, readable, toast } from "/page/api.js";

const byId = (id) => document.getElementById(id);
const DELETED = "a deleted class";
const OUTCOMES = { accept: "relabeled as suggested", reject: "kept as given", relabel: "relabeled", drop: "left out" };

export function start({ status, searchByImage }) {
  let queue = null;
  let here = 0;
  let history = []; // the decided suspects, the newest decision last
  let lastChange = Promise.resolve();

  const suspect = () => queue.suspects[here];
  const decided = () => queue.suspects.filter((one) => one.decision).length;

  // One change after the other, so that U right after A finds the decision to withdraw.
  const inTurn = (task) => (lastChange = lastChange.then(task, task));

  function showCount() {
    const left = queue ? queue.suspects.length - decided() : status.suspects;
    byId("audit-count").hidden = !left;
    byId("audit-count").textContent = left;
  }

  function showList() {
    byId("audit-list").replaceChildren(
      ...queue.suspects.map((one, k) =>
        element(
          "li",
          {},
          element(
            "button",
            { class: "queued", "data-decision": one.decision?.decision, "aria-current": k === here ? "true" : null, onclick: () => go(k) },
            one.image === null ? element("span", { class: "mini missing" }, "?") : indexedImage(one.image, ""),
            element("span", { class: "queued-text" }, element("span", {}, one.given), element("span", { class: "quiet" }, `→ ${one.suggested || DELETED}`)),
            element("span", { class: "mark", "aria-label": one.decision?.decision ?? "open" }, { accept: "✓", reject: "✕", relabel: "✎", drop: "⊘" }[one.decision?.decision] ?? ""),
          ),
        ),
      ),
    );
    byId("audit-meter").style.width = `${(100 * decided()) / queue.suspects.length}%`;
    byId("audit-undo").disabled = !history.length;
    byId("audit-progress").textContent = `${decided()} of ${queue.suspects.length} decided`;
    const current = byId("audit-list").querySelector("[aria-current]");
    const list = byId("audit-list");
    if (current) {
      list.scrollTop = current.offsetTop - list.offsetTop - list.clientHeight / 2;
      list.scrollLeft = current.offsetLeft - list.offsetLeft - list.clientWidth / 4; // on a narrow page it is a row
    }
    showCount();
  }

  function showDecision(one) {
    const outcome = one.decision ? OUTCOMES[one.decision.decision] : "not yet";
    const label = ["accept", "relabel"].includes(one.decision?.decision) ? `: ${one.decision.label}` : "";
    byId("suspect-decision").textContent = outcome + label;
  }

  // A button for each class of the neighbors, most frequent first, and its number as a key.
  function showNeighborClasses(neighbors, one) {
    const counts = new Map();
    for (const { class_name: name } of neighbors) {
      if (queue.class_names.includes(name) && name !== one.given) counts.set(name, (counts.get(name) ?? 0) + 1);
    }
    const names = [...counts].sort((a, b) => b[1] - a[1]).map(([name]) => name).slice(0, 9);
    byId("neighbor-classes").replaceChildren(
      ...names.map((name, k) =>
        element("button", { class: "small", "data-label": name, onclick: () => decide("relabel", name) }, name, element("kbd", {}, String(k + 1))),
      ),
    );
  }

  function neighborCard(one, given, suggested) {
    const kind = one.class_name === suggested ? "is-suggested" : one.class_name === given ? "is-given" : "";
    return element(
      "li",
      { class: `card ${kind}` },
      element(
        "button",
        { class: "card-main", title: one.name, "aria-label": `Search by ${one.name}`, onclick: () => searchByImage(one) },
        indexedImage(one.id, one.name),
        element("span", { class: "card-class" }, readable(one.class_name)),
      ),
      element("div", { class: "card-facts" }, element("span", { class: "distance" }, one.distance.toFixed(3))),
    );
  }

  async function showSuspect() {
    const one = suspect();
    byId("suspect-title").textContent = one.suggested ? `Is this ${one.given}, or ${one.suggested}?` : `Is this ${one.given}?`;
    byId("suspect-name").textContent = one.name;
    byId("neighbor-classes").replaceChildren();
    byId("suspect-given").textContent = one.given;
    byId("suspect-suggested").textContent = one.suggested || DELETED;
    byId("audit-accept").disabled = !one.suggested;
    const isEstimated = queue.suspects.some((each) => each.confidence > 0); // else the audit has no estimate
    const confidence = isEstimated ? percent(one.confidence, 0) : "no estimate";
    byId("suspect-confidence").textContent = confidence + (one.listed ? "" : " (not listed by the audit)");
    byId("suspect-image").replaceChildren(
      one.image === null
        ? element("span", { class: "missing" }, "not in the index")
        : element("a", { href: imageUrl(one.image, "full"), target: "_blank", rel: "noopener", title: "Open in full size" }, indexedImage(one.image, one.name, "large")),
    );
    byId("suspect-evidence").textContent = one.image === null ? `The audit found: ${one.evidence}. Index the training images to see them.` : "";
    showDecision(one);
    const whole = await attempt(() => api.suspect(one.key));
    if (!whole || suspect() !== one) return;
    showNeighborClasses(whole.neighbors, one);
    byId("suspect-neighbors").replaceChildren(...whole.neighbors.map((near) => neighborCard(near, one.given, one.suggested)));
  }

  function go(position) {
    here = Math.max(0, Math.min(queue.suspects.length - 1, position));
    showList();
    showSuspect();
  }

  function next() {
    const later = queue.suspects.findIndex((one, k) => k > here && !one.decision);
    const any = queue.suspects.findIndex((one) => !one.decision);
    if (later < 0 && any < 0) toast("All suspects are decided.", "good");
    go(later >= 0 ? later : any >= 0 ? any : here);
  }

  function decide(decision, label) {
    const one = suspect();
    if (decision === "accept" && !one.suggested) return null;
    return inTurn(async () => {
      const answer = await attempt(() => api.decide(one.key, decision, label));
      if (!answer) return;
      one.decision = answer;
      history = [...history.filter((other) => other !== one), one];
      if (suspect() === one) next();
      else showList();
    });
  }

  // Withdraws the decision on the image that is shown, or else the last one: a decision moves to the next image.
  function undo() {
    return inTurn(async () => {
      const one = suspect().decision ? suspect() : history.at(-1);
      if (!one) return;
      const done = await attempt(async () => {
        await api.withdraw(one.key);
        return true;
      });
      if (!done) return;
      one.decision = null;
      history = history.filter((other) => other !== one);
      go(queue.suspects.indexOf(one));
    });
  }

  function onKey(event) {
    if (!queue?.suspects.length || isElsewhere(event, "view-audit")) return;
    const actions = {
      a: () => decide("accept"),
      r: () => decide("reject"),
      d: () => decide("drop"),
      u: undo,
      j: () => go(here + 1),
      k: () => go(here - 1),
      l: () => byId("relabel-class").focus(),
    };
    const numbered = /^[1-9]$/.test(event.key) ? byId("neighbor-classes").children[event.key - 1] : null;
    const action = numbered ? () => numbered.click() : actions[event.key.toLowerCase()];
    if (!action) return;
    event.preventDefault();
    action();
  }

  // Loads the queue; it shows the suspect of a key if it still has it, else the first one that is open.
  async function load(key = null) {
    queue = await attempt(() => api.audit());
    if (!queue) return;
    const some = queue.suspects.length > 0;
    byId("audit-body").hidden = !some;
    byId("audit-empty").hidden = some;
    byId("audit-empty").textContent = queue.available
      ? "The audit lists no suspects."
      : "No audit yet: pfml audit RUN ranks the training images by suspected label noise. Then reload this page.";
    showCount();
    if (!some) return;
    byId("trained-names").replaceChildren(...queue.class_names.map((name) => element("option", { value: name })));
    const byKey = new Map(queue.suspects.map((one) => [one.key, one]));
    history = queue.history.map((key) => byKey.get(key));
    const first = queue.suspects.findIndex((one) => !one.decision);
    const same = queue.suspects.findIndex((one) => one.key === key);
    go(same >= 0 ? same : first < 0 ? 0 : first);
  }

  byId("audit-accept").addEventListener("click", () => decide("accept"));
  byId("audit-reject").addEventListener("click", () => decide("reject"));
  byId("audit-drop").addEventListener("click", () => decide("drop"));
  byId("audit-undo").addEventListener("click", undo);
  byId("relabel").addEventListener("submit", (event) => {
    event.preventDefault();
    const label = byId("relabel-class").value;
    byId("relabel-class").value = "";
    byId("relabel-class").blur();
    decide("relabel", label);
  });
  byId("relabel-class").addEventListener("keydown", (event) => event.key === "Escape" && event.target.blur());
  document.addEventListener("keydown", onKey);
  showCount();

  return { changed: () => load(queue?.suspects[here]?.key), shown: (first) => first && load() };
}
