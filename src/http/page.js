"use strict";
// the hues of `cotenant plot`
const hues = ["#3b6fd4", "#f09a3e", "#2f9e79", "#9a5fc7", "#c9485b", "#4aa3c7", "#8a7a3c", "#d06fa8"];
const owners = ["llm"];
const hueOf = owner => {
  if (!owners.includes(owner)) owners.push(owner);
  return hues[owners.indexOf(owner) % hues.length];
};
const byId = id => document.getElementById(id);
const say = (node, text) => { if (node.textContent !== text) node.textContent = text; };
const showIf = (node, text) => { node.hidden = !text; say(node, text || ""); };
// As many children as there are items, each brought up to date; what has not changed stays, so that selections do.
const each = (parent, tag, items, update) => {
  while (parent.children.length < items.length) parent.append(document.createElement(tag));
  while (parent.children.length > items.length) parent.lastElementChild.remove();
  items.forEach((item, at) => update(parent.children[at], item, at));
};
const size = bytes => {
  const [unit, power] = bytes >= 2 ** 30 ? ["GiB", 30] : bytes >= 2 ** 20 ? ["MiB", 20] : ["KiB", 10];
  const amount = bytes / 2 ** power;
  return `${Number.isInteger(amount) ? amount : amount.toFixed(1)} ${unit}`;
};
const span = text => {
  const seconds = parseFloat(text);
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const whole = Math.floor(seconds);
  return whole < 3600 ? `${Math.floor(whole / 60)} min ${whole % 60} s` : `${Math.floor(whole / 3600)} h ${Math.floor(whole / 60) % 60} min`;
};
// `WORKER_STATE_AWAITING_MEMORY` as `awaiting memory`
const word = (name, prefix) => (name || "").replace(prefix, "").toLowerCase().replaceAll("_", " ");
const row = (tr, cells) => each(tr, "td", cells, (td, cell, at) => {
  td.className = at > 1 ? "figure" : "";
  say(td, cell);
});
const bar = (node, parts, label) => {
  each(node, "div", parts, (part, { amount, hue, kind }) => {
    part.style.flexGrow = String(amount);
    part.style.background = hue || "";
    part.className = `${kind || ""} ${amount > 0 ? "" : "none"}`;
  });
  node.setAttribute("aria-label", label);
};
const legend = (list, parts) => each(list, "li", parts.filter(part => part.amount > 0), (item, { text, hue, kind }) => {
  if (!item.firstElementChild) item.append(document.createElement("i"), "");
  item.firstElementChild.style.background = hue || "";
  item.firstElementChild.className = kind || "";
  if (item.lastChild.data !== text) item.lastChild.data = text;
});

function showHead({ version, uptime, pressure, draining, rebootAdvised, host, board }) {
  const level = word(pressure?.level, "PRESSURE_LEVEL_");
  say(byId("level"), draining ? `${level}, draining` : level);
  byId("level").className = `pill ${level}`;
  say(byId("host"), [host, board].filter(Boolean).join(", "));
  say(byId("run"), `${version}${uptime ? `, up ${span(uptime)}` : ""}`);
  showIf(byId("reboot"), rebootAdvised && `Reboot advised: ${rebootAdvised.join("; ")}`);
  if (!pressure) return;
  const parts = [`headroom ${pressure.headroomBytes === undefined ? "unknown" : size(pressure.headroomBytes)}`];
  if (pressure.memAvailableBytes !== undefined) parts.push(`available ${size(pressure.memAvailableBytes)}`);
  if (pressure.someAvg10Ratio !== undefined) parts.push(`stalled ${(pressure.someAvg10Ratio * 100).toFixed(2)} %`);
  if (pressure.gpuUsedBytes !== undefined) parts.push(`GPU ${size(pressure.gpuUsedBytes)}${pressure.gpuUsedIsInferred ? " (inferred)" : ""}`);
  if (pressure.exhaustedIn) parts.push(`exhausted in ${span(pressure.exhaustedIn)}`);
  say(byId("pressure"), parts.join(", "));
}

function showMemory({ budget, leases, nextShed }) {
  if (!budget) return;
  say(byId("budget"), `budget ${size(budget.budgetBytes)}: held ${size(budget.heldBytes)}, used ${size(budget.usedBytes)}`);
  const held = new Map();
  for (const lease of leases) held.set(lease.tenant, (held.get(lease.tenant) || 0) + lease.heldBytes);
  [...held.keys()].sort().forEach(hueOf);
  const parts = [...held].map(([owner, amount]) => ({ amount, hue: hueOf(owner), text: `${owner} ${size(amount)}` }));
  parts.push({ amount: budget.unaccountedBytes, hue: "#8a93a6", text: `unaccounted ${size(budget.unaccountedBytes)}` });
  parts.push({ amount: budget.freeBytes, kind: "free", text: `free ${size(budget.freeBytes)}` });
  bar(byId("memory"), parts, parts.filter(part => part.amount > 0).map(part => part.text).join(", "));
  legend(byId("owners"), parts);
  showIf(byId("next"), nextShed && `Next to be shed: ${nextShed}`);
}

// Draws anew only what has changed its number of elements; the rest gets new attributes.
const draw = (parent, shapes) => {
  while (parent.children.length > shapes.length) parent.lastElementChild.remove();
  shapes.forEach(([tag, attributes, text], at) => {
    let shape = parent.children[at];
    if (shape?.tagName !== tag) {
      const made = document.createElementNS(byId("chart").namespaceURI, tag);
      shape ? shape.replaceWith(made) : parent.append(made);
      shape = made;
    }
    for (const name of shape.getAttributeNames()) if (!(name in attributes)) shape.removeAttribute(name);
    for (const [name, value] of Object.entries(attributes)) if (shape.getAttribute(name) !== String(value)) shape.setAttribute(name, value);
    if (Array.isArray(text)) draw(shape, text);
    else if (shape.textContent !== (text || "")) shape.textContent = text || "";
  });
};

// What happened, by kind: its name, and its shape around (0, 0).
const kinds = {
  shed: ["sheds", "M-6-4H6L0 6Z"],
  growth: ["growth", "M-6 4H6L0-6Z"],
  death: ["deaths", "M-5-3-3-5 0-2 3-5 5-3 2 0 5 3 3 5 0 2-3 5-5 3-2 0Z"],
  preemption: ["preemptions", "M0-6 6 0 0 6-6 0Z"],
  pressure: ["pressure", "M-2-6H2L1.5 2H-1.5ZM-1.6 3.5H1.6V6.5H-1.6Z"],
  request: ["requests", "M0-4.5A4.5 4.5 0 1 1-.01-4.5Z"],
};
const shownKinds = new Set(Object.keys(kinds));
const unaccounted = "unaccounted";
// one row for each step: { time (s), budget, held: Map of owner to bytes, speed, first }
let rows = [], marks = [], stepSeconds = 2, isDay = false, selected = null;
// the last two minutes as they were seen, which is finer
let seen = [];

function addHistory(history) {
  stepSeconds = history.stepSeconds;
  const byTime = new Map(rows.map(row => [row.time, row]));
  const held = Object.entries(history.heldBytes);
  held.map(([owner]) => owner).sort().forEach(hueOf);
  history.time.forEach((time, at) => byTime.set(time, {
    time, budget: history.budgetBytes[at], speed: history.milliTokensPerSecond[at], first: history.firstTokenMs[at],
    held: new Map([...held.map(([owner, bytes]) => [owner, bytes[at]]), [unaccounted, history.unaccountedBytes[at]]]),
  }));
  const from = Date.now() / 1000 - (isDay ? 86400 : 3600);
  rows = [...byTime.values()].filter(row => row.time >= from && row.budget !== null).sort((a, b) => a.time - b.time);
  const name = mark => `${mark.timeMs} ${mark.sequence}`;
  const byName = new Map(marks.map(mark => [name(mark), mark]));
  for (const mark of history.marks) byName.set(name(mark), mark);
  marks = [...byName.values()].filter(mark => mark.timeMs / 1000 >= from).sort((a, b) => a.timeMs - b.timeMs || a.sequence - b.sequence);
  if (selected) selected = byName.get(name(selected)) || null;
}

// the state as the last row
function rowOf({ budget, leases, snapshotTime }) {
  const held = new Map();
  for (const lease of leases) held.set(lease.tenant, (held.get(lease.tenant) || 0) + lease.heldBytes);
  return { time: Date.parse(snapshotTime) / 1000, budget: budget.budgetBytes, held: held.set(unaccounted, budget.unaccountedBytes) };
}

const clock = seconds => new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });
const chart = { left: 62, right: 8, top: 52, bottom: 22, height: 260 };

function showChart(status) {
  if (status?.budget) {
    const now = rowOf(status);
    if (seen.length && now.time - seen.at(-1).time > 3) seen = [];
    seen = [...seen.filter(row => row.time > now.time - 120), now];
  }
  const drawn = isDay ? [...rows, ...seen.slice(-1)] : [...rows.filter(row => !seen.length || row.time < seen[0].time), ...seen];
  if (!drawn.length) return;
  chart.rows = drawn;
  const { left, right, top, bottom, height } = chart;
  const width = byId("chart").clientWidth || 600;
  const to = drawn.at(-1).time, from = Math.max(to - (isDay ? 86400 : 3600), Math.min(drawn[0].time, to - 60));
  const total = row => [...row.held.values()].reduce((sum, bytes) => sum + bytes, 0);
  const highest = Math.max(...drawn.map(row => Math.max(row.budget, total(row))));
  const step = [1, 2, 5, 10, 20, 50, 100, 200, 500].flatMap(n => [n * 2 ** 20, n * 2 ** 30]).sort((a, b) => a - b).find(size => highest / size <= 5) || 2 ** 40;
  const most = highest * 1.06;
  const x = time => left + (time - from) / (to - from) * (width - left - right);
  const y = bytes => height - bottom - bytes / most * (height - top - bottom);
  Object.assign(chart, { width, from, to, x });
  const shapes = [];
  for (let bytes = 0; bytes <= most; bytes += step) {
    shapes.push(["line", { class: "grid", x1: left, x2: width - right, y1: y(bytes), y2: y(bytes) }]);
    shapes.push(["text", { x: left - 8, y: y(bytes) + 4, "text-anchor": "end" }, bytes ? size(bytes) : "0"]);
  }
  const every = [15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600].find(s => (to - from) / s <= width / 110) || 43200;
  const offset = new Date().getTimezoneOffset() * 60;
  for (let time = Math.ceil((from - offset) / every) * every + offset; time <= to; time += every) {
    if (x(time) > left + 20 && x(time) < width - 30) shapes.push(["text", { x: x(time), y: height - 6, "text-anchor": "middle" }, every < 60 ? clock(time) : clock(time).slice(0, 5)]);
  }
  // a gap in time is a gap in the chart
  const pieces = [];
  drawn.filter(row => row.time >= from).forEach((row, at, all) => {
    if (!at || row.time - all[at - 1].time > 3 * stepSeconds) pieces.push([]);
    pieces.at(-1).push(row);
  });
  const present = new Set(drawn.flatMap(row => [...row.held].filter(([, bytes]) => bytes > 0).map(([owner]) => owner)));
  const order = [...present].filter(owner => owner !== unaccounted && owner !== "llm").sort();
  if (present.has("llm")) order.push("llm");
  if (present.has(unaccounted)) order.push(unaccounted);
  const path = (row, at, all, value) => `${at ? "L" : ""}${x(row.time).toFixed(1)} ${y(value(row)).toFixed(1)}`
    + (at + 1 < all.length ? `H${x(all[at + 1].time).toFixed(1)}` : "");
  order.forEach((owner, level) => {
    const upTo = count => row => order.slice(0, count).reduce((sum, name) => sum + (row.held.get(name) || 0), 0);
    const outline = pieces.map(piece => {
      const upper = piece.map((row, at) => path(row, at, piece, upTo(level + 1))).join("");
      const lower = piece.map((row, at) => `L${x((piece[at + 1] || row).time).toFixed(1)} ${y(upTo(level)(row)).toFixed(1)}H${x(row.time).toFixed(1)}`).reverse().join("");
      return `M${upper}${lower}Z`;
    });
    shapes.push(["path", { class: "area", fill: owner === unaccounted ? "#8a93a6" : hueOf(owner), d: outline.join("") }]);
  });
  const limit = pieces.map(piece => `M${piece.map((row, at) => path(row, at, piece, one => one.budget)).join("")}`);
  shapes.push(["path", { class: "limit", d: limit.join("") }]);
  shapes.push(["text", { class: "limit-text", x: left + 4, y: y(drawn.at(-1).budget) - 4 }, "budget"]);
  const cursor = selected ? selected.timeMs / 1000 : chart.pointed;
  if (cursor >= from) shapes.push(["line", { class: "cursor", x1: x(cursor), x2: x(cursor), y1: top - 6, y2: height - bottom }]);
  draw(byId("chart"), [["g", {}, shapes], ["g", {}, glyphs()]]);
  showReading();
}

const shownMarks = () => marks.filter(mark => shownKinds.has(mark.kind) && mark.timeMs / 1000 >= chart.from);

// Marks in up to three lanes, so that neighbours do not cover each other.
function glyphs() {
  const ends = [-99, -99, -99];
  const all = shownMarks();
  const focusable = all.includes(selected) ? selected : all.at(-1);
  return all.map(mark => {
    const at = chart.x(mark.timeMs / 1000);
    let lane = ends.findIndex(end => at - end >= 13);
    if (lane < 0) lane = ends.indexOf(Math.min(...ends));
    ends[lane] = at;
    mark.x = at;
    mark.y = chart.top - 12 - 15 * lane;
    return ["g", {
      class: `mark ${mark.kind}${mark === selected ? " at" : ""}`, transform: `translate(${at.toFixed(1)} ${mark.y})`, role: "img",
      "aria-label": sentence(mark), tabindex: mark === focusable ? 0 : -1,
    }, [["line", { y1: 7, y2: chart.height - chart.bottom - mark.y }], ["path", { d: kinds[mark.kind][1] }]]];
  });
}

const sentence = mark => `${clock(mark.timeMs / 1000)} ${mark.text}`;

function showReading() {
  let text = "Point at the chart, or step through its marks with the arrow keys.";
  if (selected) text = `${sentence(selected)} (line ${selected.sequence})`;
  else if (chart.pointed !== undefined) {
    const row = chart.rows.findLast(row => row.time <= chart.pointed) || chart.rows[0];
    const held = [...row.held].filter(([, bytes]) => bytes > 0).map(([owner, bytes]) => `${owner} ${size(bytes)}`);
    const free = row.budget - [...row.held.values()].reduce((sum, bytes) => sum + bytes, 0);
    text = `${clock(row.time)} ${held.join(", ")}${held.length ? ", " : ""}free ${size(Math.max(free, 0))} of ${size(row.budget)}`;
  }
  byId("reading").className = selected ? selected.kind : "soft";
  say(byId("reading"), text);
}

function select(mark, isFocused) {
  selected = mark || null;
  showChart();
  if (mark && isFocused) byId("chart").lastElementChild.children[shownMarks().indexOf(mark)]?.focus();
}

function pointAt(event) {
  const box = byId("chart").getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  const distance = mark => Math.hypot(mark.x - x, y < chart.top ? mark.y - y : 0);
  const nearest = shownMarks().reduce((best, mark) => !best || distance(mark) < distance(best) ? mark : best, null);
  chart.pointed = Math.min(Math.max(chart.from + (x - chart.left) / (chart.width - chart.left - chart.right) * (chart.to - chart.from), chart.from), chart.to);
  select(nearest && distance(nearest) < (y < chart.top ? 14 : 5) ? nearest : null);
}

function stepMarks(event) {
  const all = shownMarks();
  const at = all.indexOf(selected);
  const next = { ArrowLeft: at < 0 ? all.length - 1 : Math.max(at - 1, 0), ArrowRight: at < 0 ? all.length - 1 : Math.min(at + 1, all.length - 1), Home: 0, End: all.length - 1 }[event.key];
  if (event.key === "Escape") select(null);
  if (next === undefined || !all.length) return;
  event.preventDefault();
  select(all[next], true);
}

function prepareChart() {
  const svg = byId("chart");
  svg.addEventListener("pointermove", pointAt);
  svg.addEventListener("pointerdown", pointAt);
  svg.addEventListener("pointerleave", event => {
    if (event.pointerType === "touch") return;
    delete chart.pointed;
    select(null);
  });
  svg.addEventListener("keydown", stepMarks);
  svg.addEventListener("focusin", event => {
    const at = [...svg.lastElementChild.children].indexOf(event.target);
    if (at >= 0 && shownMarks()[at] !== selected) select(shownMarks()[at]);
  });
  new ResizeObserver(() => showChart()).observe(svg);
  for (const [kind, [name, shape]] of Object.entries(kinds)) {
    const button = document.createElement("button");
    draw(button, [["svg", { class: `glyph ${kind}`, viewBox: "-7 -7 14 14", "aria-hidden": "true" }, [["path", { d: shape }]]]]);
    button.append(name);
    button.setAttribute("aria-pressed", "true");
    button.addEventListener("click", () => {
      shownKinds.has(kind) ? shownKinds.delete(kind) : shownKinds.add(kind);
      button.setAttribute("aria-pressed", String(shownKinds.has(kind)));
      showChart();
    });
    byId("kinds").append(button);
  }
  for (const id of ["hour", "day"]) byId(id).addEventListener("click", () => {
    isDay = id === "day";
    for (const other of ["hour", "day"]) byId(other).setAttribute("aria-pressed", String(other === id));
    rows = [];
    marks = [];
    refreshHistory();
  });
}

function showEngine(engine) {
  const there = engine && engine.state !== "ENGINE_STATE_ABSENT";
  byId("engine").hidden = !there;
  if (!there) return;
  const state = word(engine.state, "ENGINE_STATE_");
  say(byId("model"), engine.model ? `LLM ${engine.model}` : "LLM");
  const parts = [state];
  if (engine.milliTokensPerSecond) parts.push(`${(engine.milliTokensPerSecond / 1000).toFixed(1)} tokens/s expected`);
  if (engine.sheds) parts.push(`${engine.sheds} ${engine.sheds === 1 ? "shed" : "sheds"} so far, ${size(engine.shedBytes)}`);
  if (engine.changing) parts.push("changing");
  say(byId("speed"), parts.join(", "));
  showIf(byId("failure"), engine.failure);
  byId("layers").hidden = !engine.layersTotal;
  if (engine.layersTotal) {
    const { layersTotal: total, layersResident: resident } = engine;
    const text = resident === total ? `${total} in memory` : `${resident} of ${total} in memory, ${total - resident} read from disk`;
    say(byId("layers-text"), text);
    bar(byId("layers-bar"), Array.from({ length: total }, (_, layer) => ({ amount: 1, kind: layer < resident ? "full" : "gone" })), `layers: ${text}`);
  }
  byId("context").hidden = !engine.kvCapacityTokens;
  if (engine.kvCapacityTokens) {
    const capacity = engine.kvCapacityTokens, used = engine.kvUsedTokens, kept = engine.kvKeptTokens;
    const full = Math.max(engine.kvCapacityFullTokens, capacity);
    const text = `${used + kept} of ${capacity} tokens${engine.kvType ? `, ${engine.kvType}` : ""}${capacity < full ? ` (${full} when memory is back)` : ""}`;
    const context = [
      { amount: used, kind: "full", text: `running answer ${used}` },
      { amount: kept, kind: "kept", text: `kept for the next prompt ${kept}` },
      { amount: Math.max(capacity - used - kept, 0), kind: "room", text: `room ${Math.max(capacity - used - kept, 0)}` },
      { amount: full - capacity, kind: "gone", text: `given up ${full - capacity}` },
    ];
    say(byId("context-text"), text);
    bar(byId("context-bar"), context, `context: ${text}`);
    legend(byId("context-legend"), context);
  }
  const of = text => text ? span(text) : "";
  const bytes = amount => amount ? size(amount) : "";
  const sequences = engine.sequences || [];
  byId("sequences-section").hidden = !sequences.length;
  each(byId("sequences"), "tr", sequences, (tr, one) => {
    const name = one.client || (one.class === "unspecified" ? "" : one.class);
    const waits = one.state === "SEQUENCE_STATE_WAITING";
    row(tr, [`${one.id}${name ? ` ${name}` : ""}`, word(one.state, "SEQUENCE_STATE_"), of(one.waited || one.idle), String(waits ? one.promptTokens : one.kvTokens),
      bytes(one.kvBytes), bytes(one.sharedBytes), bytes(one.diskBytes), one.reusedTokens ? String(one.reusedTokens) : ""]);
  });
  showIf(byId("growth"), engine.growthWaits && `Not growing: ${engine.growthWaits}`);
}

// A line through the known values; a single one is a dot.
function showSpark(id, value, unit) {
  const known = rows.filter(row => value(row)).map(row => [row.time, value(row)]);
  byId(id).hidden = !known.length;
  if (!known.length) return;
  const svg = byId(id).lastElementChild, width = svg.clientWidth || 300, height = 44;
  const most = Math.max(...known.map(([, amount]) => amount));
  const points = known.map(([time, amount]) => [(time - chart.from) / (chart.to - chart.from) * (width - 6) + 3, height - 4 - amount / most * (height - 10)]);
  const path = points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");
  const [x, y] = points.at(-1);
  const text = `${unit(known.at(-1)[1])} last, ${unit(Math.min(...known.map(([, amount]) => amount)))} to ${unit(most)}`;
  draw(svg, [["path", { d: `M${path}` }], ["circle", { cx: x, cy: y, r: 3 }]]);
  svg.setAttribute("aria-label", text);
  say(byId(id).firstElementChild.lastElementChild, text);
}

function showSparks() {
  showSpark("speed-spark", row => row.speed, speed => (speed / 1000).toFixed(1));
  showSpark("first-spark", row => row.first, ms => ms < 1000 ? `${ms} ms` : `${(ms / 1000).toFixed(1)} s`);
}

// The last death of each worker, with its evidence, to be unfolded.
function showDeaths(deaths) {
  each(byId("deaths"), "details", deaths, (details, death) => {
    if (!details.firstElementChild) details.append(document.createElement("summary"), document.createElement("dl"));
    const [summary, list] = details.children;
    const at = new Date(death.endedTimeMs).toLocaleTimeString([], { hour12: false });
    say(summary, `${at} ${death.sentence}`);
    const facts = [["class", `${death.class} (${death.confidence})`], ...death.evidence.map(({ source, text }) => [source, text])];
    if (death.peakResidentBytes) facts.push(["peak", size(death.peakResidentBytes)]);
    if (death.remedy) facts.push(["remedy", death.remedy]);
    facts.push(["output", `cotenant postmortem ${death.worker}`]);
    while (list.children.length > 2 * facts.length) list.lastElementChild.remove();
    facts.forEach(([name, text], at) => {
      if (!list.children[2 * at]) list.append(document.createElement("dt"), document.createElement("dd"));
      say(list.children[2 * at], name);
      say(list.children[2 * at + 1], text);
    });
  });
}

function showTables({ workers, leases, postMortems }) {
  showDeaths(postMortems || []);
  byId("workers-section").hidden = !workers.length;
  each(byId("workers"), "tr", workers, (tr, worker) => {
    const degraded = worker.state === "WORKER_STATE_DEGRADED";
    let state = degraded ? `failed: ${worker.needsOperator ? "needs operator" : "given up"}` : word(worker.state, "WORKER_STATE_");
    if (worker.resting) state += ` (${worker.resting})`;
    else if (worker.windingUp) state += " (winding up)";
    if (worker.waitsFor) state += `: waits for ${worker.waitsFor}`;
    tr.className = degraded ? "bad" : "";
    row(tr, [worker.name, state, worker.pid ? String(worker.pid) : "", String(worker.starts), String(worker.failures)]);
  });
  byId("leases-section").hidden = !leases.length;
  each(byId("leases"), "tr", leases, (tr, lease) => row(tr, [lease.name, word(lease.state, "LEASE_STATE_"), size(lease.heldBytes),
    lease.usedBytes === undefined ? "" : size(lease.usedBytes), lease.target ? size(lease.target.targetBytes) : ""]));
}

// One line for each decision: its sentence, and the lines of the journal at that instant and of its outcome.
function decisionsOf({ events = [], snapshotTime, uptime }) {
  const began = Date.parse(snapshotTime) - parseFloat(uptime) * 1000 - 1000;
  const own = marks.filter(mark => mark.timeMs >= began);
  const bySequence = new Map(own.map(mark => [mark.sequence, mark]));
  const byOutcome = new Map(own.filter(mark => mark.outcomeUs).map(mark => [mark.outcomeUs, mark]));
  const decisions = [];
  for (const event of events) {
    const last = decisions.find(decision => decision.at === event.at);
    if (last) last.lines.push(event);
    else decisions.unshift({ at: event.at, time: event.time, lines: [event] });
  }
  const headed = new Map();
  for (const decision of decisions) {
    decision.marks = decision.lines.map(line => bySequence.get(line.sequence)).filter(Boolean);
    for (const mark of decision.marks) headed.set(mark, decision);
  }
  const isOutcome = decision => {
    const to = headed.get(byOutcome.get(Math.round(parseFloat(decision.at) * 1e6)));
    if (!to || to === decision || decision.marks.length) return false;
    to.lines.push(...decision.lines);
    return true;
  };
  return decisions.filter(decision => !isOutcome(decision)).map(({ time, lines, marks: heads }) => ({
    time, lines, line: lines[0].sequence, kind: (heads.find(({ kind }) => kind !== "request" && kind !== "state") || heads[0])?.kind || "",
    text: heads.map(mark => mark.text).join("; ") || (lines.find(line => line.name === "decided") || lines[0]).summary,
  }));
}

function showEvents(status) {
  const list = byId("events");
  const wanted = decisionsOf(status);
  const known = new Map([...list.children].map(item => [item.dataset.line, item]));
  const lines = new Set(wanted.map(({ line }) => String(line)));
  for (const [line, item] of known) if (!lines.has(line)) item.remove();
  wanted.forEach((decision, at) => {
    let item = known.get(String(decision.line));
    if (!item) {
      item = document.createElement("li");
      item.dataset.line = decision.line;
      item.append(document.createElement("time"), document.createElement("details"));
      item.lastElementChild.append(document.createElement("summary"), document.createElement("ol"));
    }
    if (list.children[at] !== item) list.insertBefore(item, list.children[at] || null);
    const [time, details] = item.children;
    time.dateTime = decision.time;
    say(time, clock(Date.parse(decision.time) / 1000));
    details.className = decision.kind;
    say(details.firstElementChild, decision.text);
    each(details.lastElementChild, "li", decision.lines, (line, { sequence, summary }) => say(line, `${sequence} ${summary}`));
  });
}

// The conversation with the LLM, over the same API as other clients.
const chat = { models: {}, messages: [], abort: null, recorder: null, audio: null };
const keyName = "cotenant key";

function authorization() {
  const key = sessionStorage.getItem(keyName);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

// Calls the API; the key is asked for when it is needed, and kept for this tab.
async function call(path, body, signal) {
  const headers = authorization();
  const json = body && !(body instanceof FormData);
  if (json) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, { method: body ? "POST" : "GET", headers, body: json ? JSON.stringify(body) : body, signal });
  if (answer.status === 401) {
    sessionStorage.removeItem(keyName);
    byId("key").hidden = false;
    byId("ask").hidden = true;
    throw new Error(headers.Authorization ? "This API key is not accepted." : "This needs an API key.");
  }
  if (!answer.ok) {
    const fault = await answer.json().catch(() => ({}));
    throw new Error(fault.error?.message || `The answer was ${answer.status}.`);
  }
  return answer;
}

async function prepareChat() {
  byId("chat").hidden = false;
  try {
    const { data } = await (await call("v1/models")).json();
    for (const { id, task } of data) chat.models[task] ??= id;
    byId("key").hidden = true;
    byId("chat").hidden = !chat.models.chat;
    byId("ask").hidden = false;
    byId("microphone").hidden = !(chat.models.transcription && chat.models.speech && navigator.mediaDevices?.getUserMedia);
    say(byId("chat-state"), "");
  } catch (fault) {
    say(byId("chat-state"), fault.message);
  }
}

function busy(what) {
  say(byId("chat-state"), what);
  byId("stop").hidden = !what;
  byId("send").hidden = byId("forget").hidden = Boolean(what);
  byId("forget").hidden ||= !chat.messages.length;
  byId("microphone").disabled = Boolean(what) && !chat.recorder;
}

function bubble(role, text) {
  const line = document.createElement("p");
  line.className = role;
  line.textContent = text;
  byId("said").hidden = false;
  byId("said").append(line);
  line.scrollIntoView({ block: "nearest" });
  return line;
}

// Runs one step at a time; Stop ends it wherever it is.
async function during(what, step) {
  chat.abort = new AbortController();
  busy(what);
  try {
    await step(chat.abort.signal);
  } catch (fault) {
    if (fault.name !== "AbortError") bubble("bad", fault.message);
  }
  chat.abort = null;
  busy("");
}

// The pieces of an answer, from server-sent events.
async function* pieces(answer) {
  let rest = "";
  for (const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: {")) continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      const text = event.choices?.[0]?.delta?.content;
      if (text) yield text;
    }
  }
}

async function answer(question, signal) {
  chat.messages.push({ role: "user", content: question });
  bubble("user", question);
  const said = { role: "assistant", content: "" };
  let line = null;
  try {
    const stream = await call("v1/chat/completions", { model: chat.models.chat, messages: chat.messages, stream: true }, signal);
    for await (const piece of pieces(stream)) {
      said.content += piece;
      line ??= bubble("assistant", "");
      line.textContent = said.content;
      line.scrollIntoView({ block: "nearest" });
    }
  } finally {
    // what was said before a stop stays in the conversation; a question without an answer does not
    said.content ? chat.messages.push(said) : chat.messages.pop();
  }
  return said.content;
}

async function speak(text, signal) {
  const wave = await call("v1/audio/speech", { model: chat.models.speech, input: text, response_format: "wav" }, signal);
  const source = chat.audio.createBufferSource();
  source.buffer = await chat.audio.decodeAudioData(await wave.arrayBuffer());
  source.connect(chat.audio.destination);
  await new Promise(ended => {
    source.onended = ended;
    signal.addEventListener("abort", () => source.stop());
    source.start();
  });
}

async function hear(recording) {
  await during("Listening to the recording", async signal => {
    const form = new FormData();
    form.append("file", recording, "speech");
    form.append("model", chat.models.transcription);
    const { text } = await (await call("v1/audio/transcriptions", form, signal)).json();
    if (!text.trim()) throw new Error("Nothing was heard.");
    busy("Answering");
    const said = await answer(text.trim(), signal);
    busy("Speaking");
    if (said) await speak(said, signal);
  });
}

async function record() {
  if (chat.recorder) {
    chat.recorder.stop();
    return;
  }
  try {
    chat.audio ??= new AudioContext();
    const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
    const recorder = chat.recorder = new MediaRecorder(stream);
    const recorded = [];
    recorder.ondataavailable = ({ data }) => recorded.push(data);
    recorder.onstop = () => {
      for (const track of stream.getTracks()) track.stop();
      chat.recorder = null;
      byId("microphone").setAttribute("aria-pressed", "false");
      say(byId("microphone"), "Speak");
      hear(new Blob(recorded, { type: recorder.mimeType }));
    };
    recorder.start();
    byId("microphone").setAttribute("aria-pressed", "true");
    say(byId("microphone"), "Done");
    say(byId("chat-state"), "Recording; press Done when you have spoken.");
  } catch (fault) {
    bubble("bad", `No microphone: ${fault.message}`);
  }
}

function wireChat() {
  const question = byId("question");
  const send = () => {
    const text = question.value.trim();
    if (!text || chat.abort) return;
    question.value = "";
    during("Answering", signal => answer(text, signal));
  };
  byId("ask").addEventListener("submit", event => {
    event.preventDefault();
    send();
  });
  question.addEventListener("keydown", event => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  byId("stop").addEventListener("click", () => chat.abort?.abort());
  byId("microphone").addEventListener("click", record);
  byId("forget").addEventListener("click", () => {
    chat.messages = [];
    byId("said").replaceChildren();
    byId("said").hidden = true;
    busy("");
    question.focus();
  });
  byId("key").addEventListener("submit", event => {
    event.preventDefault();
    sessionStorage.setItem(keyName, byId("key-text").value.trim());
    byId("key-text").value = "";
    prepareChat();
    refresh();
  });
}

// Commands of an operator; the outcome is a sentence.
async function operate(command, what) {
  const outcome = byId("outcome");
  outcome.className = "soft";
  say(outcome, `${what} …`);
  try {
    const { outcome: sentence } = await (await call("operate", command)).json();
    say(outcome, `${what}: ${sentence}`);
  } catch (fault) {
    outcome.className = "bad";
    say(outcome, fault.message);
  }
  refresh();
}

let restarting = null;
function confirmRestart(worker) {
  restarting = worker;
  byId("confirm").hidden = !worker;
  if (!worker) return;
  say(byId("confirm-text"), `Restart worker ${worker}? Its requests fail.`);
  byId("confirm-no").focus();
}

function wireOperator() {
  byId("shed").addEventListener("submit", event => {
    event.preventDefault();
    const amount = byId("shed-size").valueAsNumber;
    operate({ command: "shed", bytes: amount * 2 ** 20 }, `Shed ${amount} MiB`);
  });
  byId("regrow").addEventListener("click", () => operate({ command: "regrow" }, "Grow back"));
  byId("confirm-no").addEventListener("click", () => confirmRestart(null));
  byId("confirm-yes").addEventListener("click", () => {
    operate({ command: "restart", worker: restarting }, `Restart ${restarting}`);
    confirmRestart(null);
  });
}

function showOperator({ mayOperate, engine, workers }) {
  byId("operate").hidden = !mayOperate;
  const there = engine && engine.state !== "ENGINE_STATE_ABSENT";
  byId("shed").hidden = byId("regrow").hidden = !there;
  each(byId("restarts"), "button", workers.filter(worker => worker.pid), (button, { name }) => {
    say(button, `Restart ${name}`);
    button.onclick = () => confirmRestart(name);
  });
}

let lastSeen = null, failures = 0, timer = null, asking = false, historyAt = -Infinity;

function lost(why) {
  failures += 1;
  say(byId("level"), "no answer");
  byId("level").className = "pill bad";
  byId("main").className = "stale";
  const older = lastSeen === null ? "" : ` What follows is ${Math.round((performance.now() - lastSeen) / 1000)} s old.`;
  showIf(byId("lost"), why + older);
}

async function read() {
  try {
    const answer = await fetch("status.json", { cache: "no-store", headers: authorization(), signal: AbortSignal.timeout(5000) });
    if (answer.ok) return await answer.json();
    if (answer.status === 401) byId("key").hidden = false;
    lost(answer.status === 401 ? "An API key is needed." : `The answer was ${answer.status}.`);
  } catch {
    lost("No answer; asking again.");
  }
}

// Steps and marks of the last half minute may have changed since they were read.
async function refreshHistory() {
  historyAt = performance.now();
  const after = rows.length ? `&after=${Math.floor(rows.at(-1).time) - (isDay ? 120 : 30)}` : "";
  try {
    const answer = await fetch(`history.json?${isDay ? "day" : "hour"}${after}`, { cache: "no-store", headers: authorization(), signal: AbortSignal.timeout(5000) });
    if (answer.ok) addHistory(await answer.json());
    showChart();
  } catch { /* the status says that there is no answer */ }
}

async function refresh() {
  if (asking) return;
  asking = true;
  clearTimeout(timer);
  const status = await read();
  asking = false;
  if (status) failures = 0;
  // less often the longer there is no answer, and not while the page is hidden
  if (!document.hidden) timer = setTimeout(refresh, 700 * Math.min(2 ** failures, 8));
  if (!status) return;
  lastSeen = performance.now();
  byId("main").className = "";
  byId("shown").hidden = false;
  showIf(byId("lost"), "");
  showHead(status);
  showMemory(status);
  if (performance.now() - historyAt > 4000) await refreshHistory();
  showChart(status);
  showEngine(status.engine);
  showSparks();
  showTables(status);
  showOperator(status);
  showEvents(status);
}
document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
addEventListener("online", refresh);
prepareChart();
wireChat();
wireOperator();
prepareChat();
refresh();
