// Asks the router for its figures once a second and shows what became of them. Sums come; rates are made here.
"use strict";

const EVERY_MS = 1000;
const KEPT = 180; // answers that are plotted
const MINUTE = 60;
const SVG = "http://www.w3.org/2000/svg";

const seen = []; // answers, oldest first
const find = (id) => document.getElementById(id);

async function look() {
  try {
    const answer = await fetch("live", { cache: "no-store" });
    if (!answer.ok) throw new Error(answer.status);
    take(await answer.json());
    await lookAtTree();
    say("live", "live");
  } catch (error) {
    say("the router does not answer", "lost");
  }
  setTimeout(look, EVERY_MS);
}

// One generation's tree, as its latest step verified it.
let watched = "";

function watch(session) {
  watched = watched === session ? "" : session;
  find("tree").hidden = !watched;
  find("tree-plot").replaceChildren();
  find("tree-name").textContent = `the tree of ${watched}: filled nodes were accepted`;
  find("tree-state").textContent = "waiting for a step";
  for (const button of document.querySelectorAll("#generations button")) {
    button.setAttribute("aria-pressed", button.textContent === watched);
  }
}

async function lookAtTree() {
  const session = watched;
  if (!session) return;
  const answer = await fetch(`tree/${session}`, { cache: "no-store" });
  const step = await answer.json();
  if (session === watched && step.problem) find("tree-state").textContent = step.problem;
  if (session === watched && step.nodes) tree(step, seen.at(-1).generations.some((one) => one.session === session));
}

function tree(step, runs) {
  const { add, width, height } = draw("tree-plot");
  const depths = [], leaves = [];
  step.nodes.forEach(([parent], at) => {
    depths[at] = parent < 0 ? 1 : depths[parent] + 1;
    leaves[at] = 0;
  });
  for (let at = step.nodes.length - 1, last = new Set(); at >= 0; at--) { // children come after their parents
    if (!last.has(at)) leaves[at] = 1;
    const parent = step.nodes[at][0];
    if (parent >= 0) { leaves[parent] += leaves[at]; last.add(parent); }
  }
  const all = Math.max(1, step.nodes.reduce((sum, [parent], at) => sum + (parent < 0 ? leaves[at] : 0), 0));
  const begins = [], taken = new Map([[-1, 0]]);
  step.nodes.forEach(([parent], at) => {
    begins[at] = taken.get(parent) ?? begins[parent];
    taken.set(parent, begins[at] + leaves[at]);
  });
  const deepest = Math.max(1, ...depths);
  const x = (at) => 12 + (at < 0 ? 0.5 : (begins[at] + leaves[at] / 2) / all) * (width - 24);
  const y = (at) => 14 + (at < 0 ? 0 : depths[at] / deepest) * (height - 28);
  step.nodes.forEach(([parent, , accepted], at) =>
    add("line", { x1: x(parent), y1: y(parent), x2: x(at), y2: y(at), class: accepted ? "accepted" : "" }));
  add("circle", { cx: x(-1), cy: y(-1), r: 5, class: "root" });
  step.nodes.forEach(([, chance, accepted], at) =>
    add("circle", { cx: x(at), cy: y(at), r: 3 + 5 * Math.sqrt(chance), class: accepted ? "accepted" : "" }));
  find("tree-state").textContent = `${runs ? "" : "It has ended; its last step: "}position ${step.position}: ${step.nodes.length} nodes verified, ${step.accepted} accepted, `
    + `${step.committed} tokens committed; ${step.left_out} nodes left out; pass ${step.pass_ms.toFixed(1)} ms, held back `
    + `${step.waited_ms.toFixed(1)} ms, gamma ${step.gamma}. A larger node is likelier by its drafter.`;
}

function say(text, kind) {
  if (find("state").textContent !== text) find("state").textContent = text; // a screen reader reads it once
  find("state").className = kind;
}

// What the router kept of the minutes before the page was opened.
async function recall() {
  const answer = await fetch("history", { cache: "no-store" });
  if (answer.ok) seen.push(...(await answer.json()).map((one) => ({ ...one, models: [], generations: [] })));
}

function take(now) {
  if (seen.length && seen.at(-1).router !== now.router) seen.length = 0; // it is another one: its sums begin anew
  seen.push(now);
  if (seen.length > KEPT) seen.shift();
  find("router").textContent = now.router;
  figures(now);
  plot("goodput-plot", rates((one, next) => over(next.tokens - one.tokens, next.time - one.time)));
  plot("length-plot", rates((one, next) => length(one, next)));
  plot("gamma-plot", seen.map(gamma));
  bars("depth-plot", depths(seen.at(-Math.min(MINUTE, seen.length)), now));
  models(now);
  workers(now);
  generations(now);
}

const over = (part, whole) => (whole > 0 ? part / whole : NaN);
const rates = (rate) => seen.slice(1).map((next, at) => rate(seen[at], next));
const shown = (value, digits = 1) => (Number.isFinite(value) ? value.toFixed(digits) : "-");
const share = (value) => (Number.isFinite(value) ? `${Math.round(100 * value)} %` : "-");

// Tokens a step: what is drafted and accepted, and the one that each step adds.
const length = (one, next) => 1 + over(next.accepted - one.accepted, next.steps - one.steps);
const gamma = (now) => now.gamma ?? NaN;

function figures(now) {
  const before = seen.at(-Math.min(5, seen.length));
  find("goodput").textContent = shown(over(now.tokens - before.tokens, now.time - before.time), 0);
  find("length").textContent = shown(length(before, now), 2);
  find("rate").textContent = share(over(now.accepted - before.accepted, now.verified - before.verified));
  find("gamma").textContent = shown(gamma(now));
  speedup(now);
  find("saved").textContent = now.accepted.toLocaleString("en");
  find("running").textContent = now.running;
  find("waiting").textContent = Object.values(now.waiting).reduce((sum, count) => sum + count, 0);
}

// Of all verifiers that have sessions, beside what they would do without drafts; the error of that is their estimate's.
function speedup(now) {
  const busy = now.workers.filter((one) => one.plain_tokens_per_s > 0 && one.sessions > 0);
  const sum = (of) => busy.reduce((total, one) => total + of(one), 0);
  const plain = sum((one) => one.plain_tokens_per_s);
  const error = over(sum((one) => one.plain_tokens_per_s * one.plain_error), plain);
  find("speedup").textContent = shown(over(sum((one) => one.tokens_per_s), plain), 2);
  find("plain").textContent = plain ? `${shown(sum((one) => one.tokens_per_s), 0)}/s, plain ${shown(plain, 0)} ± ${share(error)}` : "";
}

// Of the steps that verified a node so deep, how many accepted so deep.
function depths(before, now) {
  return now.tried_by_depth.map((tried, at) =>
    over((now.reached_by_depth[at] || 0) - (before.reached_by_depth[at] || 0), tried - (before.tried_by_depth[at] || 0)));
}

function draw(id) {
  const svg = find(id);
  svg.replaceChildren();
  const { width, height } = svg.getBoundingClientRect();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const add = (name, attributes, text = "") => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.textContent = text;
    svg.append(made);
  };
  return { add, width, height };
}

function axis(add, width, height, top, format) {
  for (const part of [0, 0.5, 1]) {
    const y = height - 14 - part * (height - 26);
    add("line", { x1: 40, x2: width, y1: y, y2: y });
    add("text", { x: 36, y: y + 4, "text-anchor": "end" }, format(part * top));
  }
}

function plot(id, values) {
  const { add, width, height } = draw(id);
  const top = Math.max(1, ...values.filter(Number.isFinite)) * 1.1;
  axis(add, width, height, top, (value) => shown(value, top < 20 ? 1 : 0));
  const x = (at) => 40 + (at + KEPT - values.length) * (width - 40) / KEPT;
  const y = (value) => height - 14 - (value / top) * (height - 26);
  let path = "";
  values.forEach((value, at) => {
    if (Number.isFinite(value)) path += `${path && Number.isFinite(values[at - 1]) ? "L" : "M"}${x(at)} ${y(value)}`;
  });
  if (path) add("path", { d: path });
  add("text", { x: width, y: height - 1, "text-anchor": "end" }, "now");
}

function bars(id, values) {
  const { add, width, height } = draw(id);
  axis(add, width, height, 1, share);
  const each = (width - 40) / Math.max(8, values.length);
  values.forEach((value, at) => {
    const tall = (value || 0) * (height - 26);
    add("rect", { x: 40 + at * each + 2, y: height - 14 - tall, width: Math.max(1, each - 4), height: tall });
    if (each > 14 || at % 4 === 0) add("text", { x: 40 + (at + 0.5) * each, y: height - 2, "text-anchor": "middle" }, at + 1);
  });
}

// Rows and cells are kept as long as what their first cell names, so that whatever has the focus keeps it.
function rows(id, lines) {
  const body = find(id).tBodies[0];
  const names = [...find(id).tHead.rows[0].cells].map((cell) => cell.textContent);
  const kept = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  lines.forEach((cells, at) => {
    const key = cells[0].text ?? cells[0];
    const row = kept.get(key) || document.createElement("tr");
    kept.delete(key);
    row.dataset.key = key;
    if (body.rows[at] !== row) body.insertBefore(row, body.rows[at] || null);
    cells.forEach((cell, column) => {
      const made = row.cells[column] || row.insertCell();
      made.dataset.name = names[column]; // where there is no room for columns
      fill(made, cell);
    });
  });
  for (const row of kept.values()) row.remove();
}

function fill(made, cell) {
  const text = String(cell.text ?? cell);
  made.className = [cell.bad && "bad", cell.long && "long"].filter(Boolean).join(" ");
  made.title = cell.why || "";
  if (!cell.press) {
    if (made.textContent !== text) made.textContent = text;
    return;
  }
  let button = made.querySelector("button");
  if (!button) {
    button = document.createElement("button");
    button.type = "button";
    button.textContent = text;
    button.addEventListener("click", cell.press);
    made.append(button);
  }
  button.setAttribute("aria-pressed", text === watched);
}

// Of the last steps: since the answer that the figures at the top begin with.
function models(now) {
  const before = new Map(seen.at(-Math.min(5, seen.length)).models.map((one) => [one.name, one.steps]));
  rows("models", now.models.map((one) => {
    const steps = Object.entries(one.steps)
      .map(([reason, count]) => [reason, count - (before.get(one.name)?.[reason] || 0)])
      .filter(([, count]) => count > 0)
      .sort(([, some], [, others]) => others - some);
    const all = steps.reduce((sum, [, count]) => sum + count, 0);
    const drafting = steps.find(([reason]) => reason === "drafting")?.[1] || 0;
    const without = steps.filter(([reason]) => reason !== "drafting");
    return [one.name, share(over(drafting, all)),
      without.map(([reason, count]) => `${reason} ${share(over(count, all))}`).join(", ") || "-",
      { text: one.misfits.map(([id, why]) => `${id}: ${why}`).join("; "), bad: true, long: true }];
  }));
}

function workers(now) {
  rows("workers", now.workers.map((one) => {
    const [verified, accepted] = now.drafters[one.id] || [0, 0];
    return [one.id, one.role, one.model, one.role === "drafter" ? one.tier : "", one.zone || "",
      `${one.sessions} of ${one.slots}`, shown(one.cores, 2), share(over(accepted, verified)),
      { text: one.arm && `${one.arm}: ${one.arm_reason}`, why: one.arm_reason, long: true },
      one.suspected ? { text: "failed lately", bad: true } : "well"];
  }));
}

function generations(now) {
  const before = new Map((seen.at(-2)?.generations || []).map((one) => [one.session, one]));
  rows("generations", now.generations.map((one) => {
    const then = before.get(one.session) || { tokens: 0, seconds: 0 };
    return [{ text: one.session, press: () => watch(one.session) }, one.model, one.tokens, shown(over(one.tokens - then.tokens, one.seconds - then.seconds), 0),
      shown(1 + over(one.accepted, one.steps), 2), one.speculation === "drafting" ? one.gamma : "-", one.verifier, one.drafters.join(", "),
      { text: one.speculation === "drafting" ? "drafting" : one.why, why: one.why, long: true }];
  }));
}

recall().finally(look);
