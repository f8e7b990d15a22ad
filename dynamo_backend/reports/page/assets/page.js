"use strict";
// The page of a report. What is shown lies in the address (#graph=0&q=gelu&open=NAME), so that a view can be shared.

const told = JSON.parse(document.getElementById("data").textContent);
const state = { graph: 0, q: "", open: "", theme: "", ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))) };
const KINDS = { kernel: "compiled here", library: "library call" };

function keep() {
  const said = new URLSearchParams(Object.entries(state).filter(([, v]) => v !== "" && v !== 0));
  history.replaceState(null, "", `#${said}`);
}

/** Kernels and library calls of a graph, the most expensive first: by time where it is known of all, else by bytes. */
function rowsOf(graph) {
  const rows = [
    ...graph.kernels.map((k) => ({ ...k, kind: "kernel", key: k.name, all: (k.moved || 0) * k.calls, time: k.seconds === null ? null : k.seconds * k.calls })),
    ...mergedLibraries(graph.libraries),
  ];
  const timed = rows.length > 0 && rows.every((r) => r.time !== null);
  const cost = (r) => (timed ? r.time : r.all);
  const whole = rows.reduce((sum, r) => sum + cost(r), 0) || 1;
  rows.forEach((r) => { r.share = cost(r) / whole; });
  return { timed, rows: rows.sort((a, b) => b.share - a.share) };
}

/** Calls of one op are one row, with the reasons of all. */
function mergedLibraries(libraries) {
  const found = new Map();
  for (const c of libraries) {
    const row = found.get(c.name) || { ...c, kind: "library", key: c.name, calls: 0, all: 0, time: 0, lines: [], reasons: [], tolds: [] };
    row.calls += c.calls;
    row.all += c.moved;
    row.time = row.time === null || c.seconds === null ? null : row.time + c.seconds;
    row.lines = [...new Set([...row.lines, ...c.lines])];
    row.reasons = [...new Set([...row.reasons, c.reason])];
    row.tolds = [...new Set([...row.tolds, `${many(c.calls, "call")}: ${c.told}`])];
    found.set(c.name, row);
  }
  return [...found.values()];
}

function lead(graph, total) {
  const spent = graph.phases.reduce((sum, p) => sum + p.seconds, 0);
  const launches = graph.launches;
  const tile = (value, what, why) => make("div", { class: "tile", title: why }, make("b", {}, value), make("span", {}, what));
  return [
    make("p", {}, `torch-mlc compiled this graph for ${graph.target}. One run starts ${many(launches, "kernel")}`,
      launches === graph.kernels.length ? "" : ` (${many(graph.kernels.length, "different one", "different ones")})`,
      ` and makes ${many(graph.library_calls, "library call")}. A kernel does several operations of the model in one pass over memory.`),
    make("div", { class: "tiles" },
      total === null ? null : tile(seconds(total), "predicted time of a run", "by a model that no measurement has corrected"),
      tile(bytes(graph.moved.kernels + graph.moved.libraries), "read and written in a run", "by kernels and library calls together"),
      tile(`${graph.moved.ratio.toFixed(2)} ×`, "of the least possible", `inputs and results once each are ${bytes(graph.moved.least)}`),
      tile(bytes(graph.peak.bytes), "memory beside the inputs, at most", graph.peak.text),
      tile(seconds(spent), "to compile", "without PyTorch's own tracing")),
  ];
}

function workTable(graph, { timed, rows }) {
  const head = ["share", "what it does", "where it is in your code", "runs", "reads + writes", timed ? "time" : "least possible"];
  const body = make("tbody");
  for (const row of rows) {
    const line = make("tr", { class: "row", tabindex: 0, "aria-expanded": "false" },
      make("td", { class: "number" }, make("span", { class: `share ${row.kind}`, style: `width:${Math.max(2, 80 * row.share)}px` }), ` ${(100 * row.share).toFixed(row.share < 0.1 ? 1 : 0)} %`),
      make("td", { class: "name what", title: (row.ops || [row.name]).join(", ") }, make("span", { class: `kind ${row.kind}`, title: KINDS[row.kind] }),
        row.kind === "kernel" ? operations(row.ops, 4) || row.name : plainName(row.name),
        row.error ? make("span", { class: "bad" }, " did not compile: PyTorch's operations run instead") : null),
      make("td", { class: "from wide" }, row.lines.length ? short(row.lines[0], 90) : "", row.lines.length > 1 ? ` and ${many(row.lines.length - 1, "more line")}` : ""),
      make("td", { class: "number" }, `${row.calls}`),
      make("td", { class: "number" }, bytes(row.all)),
      make("td", { class: timed ? "number" : "number wide" }, timed ? seconds(row.time) : row.kind === "kernel" && row.least !== null ? bytes(row.least * row.calls) : ""));
    line.dataset.key = row.key;
    line.dataset.words = searched(row);
    const more = make("tr", { class: "hidden" }, make("td", { class: "inside", colspan: head.length }));
    const toggle = () => show(line, more, row, more.classList.contains("hidden"));
    line.addEventListener("click", toggle);
    line.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); toggle(); } });
    body.append(line, more);
    if (state.open === row.key) show(line, more, row, true);
  }
  const order = timed ? "predicted time" : "bytes that are read and written";
  return [
    make("h2", {}, "What runs, the most expensive first"),
    make("p", { class: "quiet" }, `Sorted by ${order}. Choose a row to see its code. `,
      make("span", { class: "kind" }), "compiled by torch-mlc ", make("span", { class: "kind library" }), "left to a library of PyTorch's"),
    make("table", { id: "work" }, make("thead", {}, make("tr", {}, head.map((h, k) => make("th", { class: k > 2 ? (k === 5 && !timed ? "number wide" : "number") : k === 2 ? "wide" : null, scope: "col" }, h)))), body),
  ];
}

function searched(row) {
  return [row.name, ...(row.ops || []), ...(row.ops || [row.name]).map(plainName), ...row.lines, row.rule || "", ...(row.reasons || []), row.source || "", row.definition || ""].join("\n").toLowerCase();
}

function show(line, more, row, open) {
  line.setAttribute("aria-expanded", `${open}`);
  more.classList.toggle("hidden", !open);
  if (open && !more.firstChild.hasChildNodes()) more.firstChild.append(...(row.kind === "kernel" ? kernelDetails(row) : libraryDetails(row)));
  state.open = open ? row.key : "";
  keep();
}

function text(title, body, note, open) {
  if (!body) return null;
  const holder = make("details", { open: open || null }, make("summary", {}, title, note ? make("span", { class: "quiet" }, ` – ${note}`) : null));
  const fill = () => { if (!holder.querySelector("pre")) holder.append(make("pre", {}, body)); };
  holder.addEventListener("toggle", fill);
  if (open) fill();
  return holder;
}

function kernelDetails(k) {
  const arrays = k.arrays.map((a) => make("tr", {}, make("td", {}, a.name), make("td", { class: "number" }, bytes(a.touched)),
    make("td", { class: "number" }, bytes(a.read)), make("td", { class: "number" }, bytes(a.written))));
  return [
    make("p", {}, make("b", {}, k.name), `: ${many(k.calls, "run")}; PyTorch's operations ${k.ops.join(", ")}`),
    k.lines.length ? make("div", { class: "from" }, k.lines.map((l) => make("div", {}, l))) : null,
    k.error ? make("p", { class: "bad" }, k.error) : null,
    k.notes.map((n) => make("p", { class: "quiet" }, `Computed here rather than by a library: ${n}`)),
    make("p", { class: "quiet" }, `Order of its loops: ${k.chosen || "by default"}, rule ${k.rule || "none"}.`,
      k.bound ? ` Predicted ${seconds(k.seconds)} a run, limited by ${k.bound}.` : "", k.resources ? ` ${taken(k.resources)}` : ""),
    text("What it computes", k.definition, "a formula for one element of each result", true),
    text("Schedule", k.schedule, "the steps that order its loops; edit them with options={\"schedules\": …}"),
    text("Loops", k.scheduled, "after these steps"),
    text(`Source (${k.language})`, k.source, "as it was compiled"),
    text("Schedules that were tried", k.candidates.join("\n"), "by tuning"),
    arrays.length ? make("details", {}, make("summary", {}, "Arrays"), make("table", {}, make("thead", {}, make("tr", {},
      ["array", "touched", "read", "written"].map((h, n) => make("th", { class: n ? "number" : null }, h)))), make("tbody", {}, arrays))) : null,
    text("As a script", k.script, "to change the schedule by hand"),
  ].flat().filter(Boolean);
}

function taken(r) {
  const parts = [`${r.registers} registers a thread`, `${r.threads} threads a block`, `${bytes(r.shared)} of shared memory`];
  if (r.occupancy !== null) parts.push(`${Math.round(100 * r.occupancy)} % of the threads that fit`);
  if (r.spills) parts.push(`${bytes(r.spills)} of registers spilled to memory`);
  return `It takes ${parts.join(", ")}.`;
}

function libraryDetails(c) {
  return [
    make("p", {}, make("b", {}, c.name), `: ${many(c.calls, "call")} of PyTorch's own library`),
    make("p", {}, "Why it is not compiled here:"), c.reasons.map((r) => make("p", { class: "quiet" }, r)),
    make("div", { class: "from" }, c.lines.map((l) => make("div", {}, l))),
    text("In full", c.tolds.join("\n"), "with what stands against reading each operand in another form"),
  ].flat().filter(Boolean);
}

function flow(graph, shares) {
  const calls = graph.calls;
  if (!calls.length) return [];
  const byName = new Map(graph.kernels.map((k) => [k.name, k]));
  const gutter = 96, holder = make("div", { class: "flow", id: "flow" }), svg = make("svg");
  const list = make("div", { style: `margin-left:${gutter}px` });
  const boxes = calls.map((c, at) => {
    const k = byName.get(c.name);
    const given = c.inputs.length ? `reads ${many(c.inputs.length, "input or parameter", "inputs or parameters")}` : "";
    const box = make("div", { class: `box ${c.kind}`, title: c.name },
      make("span", { class: "quiet" }, `${at + 1}. `), k ? k.ops.map((o) => make("span", { class: "chip" }, operations([o], 1))) : plainName(c.name),
      graph.results.includes(at) ? make("span", { class: "chip" }, "a result") : null,
      make("span", { class: "from" }, short(c.lines[c.lines.length - 1] || "", 110)),
      given ? make("span", { class: "from", title: c.inputs.join(", ") }, given) : null);
    box.dataset.words = [c.name, ...c.lines, ...(k ? k.ops : []), ...(k ? k.ops : [c.name]).map(plainName)].join("\n").toLowerCase();
    return box;
  });
  list.append(...boxes);
  holder.append(svg, list);
  let paths = [];
  const place = () => {
    svg.setAttribute("width", gutter + 12);
    svg.setAttribute("height", list.offsetTop + list.offsetHeight);
    paths = connections(calls, boxes, gutter + 10, svg);
  };
  boxes.forEach((box, at) => {
    const light = (on) => {
      paths.forEach((p) => p.classList.toggle("lit", on && (+p.dataset.from === at || +p.dataset.to === at)));
      boxes.forEach((b, n) => b.classList.toggle("lit", on && (n === at || calls[at].reads.includes(n) || calls[n].reads.includes(at))));
    };
    box.addEventListener("mouseenter", () => light(true));
    box.addEventListener("mouseleave", () => light(false));
    box.addEventListener("click", () => reveal(calls[at]));
  });
  requestAnimationFrame(place);
  window.addEventListener("resize", place);
  return [
    make("h2", {}, "In which order, and what reads what"),
    make("p", { class: "quiet" }, "Each box is a kernel with the operations in it, or a library call. Lines go from a result to those that read it; point at a box to follow them."),
    holder,
  ];
}

function reveal(call) {
  const row = [...document.querySelectorAll("#work tr.row")].find((r) => r.dataset.key === call.name );
  if (!row) return;
  if (row.getAttribute("aria-expanded") !== "true") row.click();
  row.scrollIntoView({ block: "center" });
}

function rest(graph) {
  const parts = [];
  if (graph.calls.length && graph.calls.every((c) => c.held !== null)) {
    parts.push(make("h2", {}, "Memory while it runs"), make("p", { class: "quiet" }, "What is held beside the model's inputs and parameters, call by call."),
      make("figure", {}, memoryChart(graph.calls, reveal)));
  }
  const roof = roofline(graph.kernels, graph.roof, (k) => reveal(k));
  if (roof) {
    parts.push(make("h2", {}, "What limits the kernels"),
      make("p", { class: "quiet" }, "Each dot is a kernel. On the slope it waits for memory, and fewer bytes make it faster; under the level line it waits for arithmetic. ",
        graph.kernels.some((k) => k.seconds !== null) ? "Heights are predicted." : "Heights are the most that the bytes it moves allow; nothing was timed. ",
        `The lines are what ${graph.roof.name === "cpu" ? "this CPU" : graph.roof.name} is taken to reach.`),
      make("figure", {}, roof));
  }
  if (graph.missed.length) {
    parts.push(make("h2", {}, "What could not be done in one kernel"),
      make("table", { id: "missed" }, make("thead", {}, make("tr", {}, ["bytes that both touch", "first", "second", "why"].map((h, n) => make("th", { class: n ? null : "number" }, h)))),
        make("tbody", {}, graph.missed.map((m) => { const row = make("tr", {}, make("td", { class: "number" }, bytes(m.bytes)), make("td", { class: "name" }, m.first), make("td", { class: "name" }, m.second), make("td", {}, m.reason));
          row.dataset.words = `${m.first}\n${m.second}\n${m.reason}`.toLowerCase(); return row; }))));
  }
  if (graph.frozen.length) {
    parts.push(make("h2", {}, "What is computed once and kept"), make("table", {}, make("tbody", {}, graph.frozen.map((f) => make("tr", {}, make("td", { class: "number" }, bytes(f.bytes)), make("td", {}, f.told))))));
  }
  if ((graph.variants || []).length) {
    parts.push(make("h2", {}, "Programs for different sizes"),
      make("table", {}, make("thead", {}, make("tr", {}, ["when the size is", "kernel launches", "library calls"].map((h, n) => make("th", { class: n ? "number" : null }, h)))),
        make("tbody", {}, graph.variants.map((v) => make("tr", {}, make("td", { class: "name" }, v.is_typical ? `${v.condition} (what this page shows)` : v.condition), make("td", { class: "number" }, `${v.launches}`), make("td", { class: "number" }, `${v.library_calls}`))))),
      make("p", { class: "quiet" }, `${many(graph.shared_kernels, "kernel")} in more than one; ${graph.proof}`));
  }
  parts.push(make("h2", {}, "Where compile time went"), make("figure", {}, barChart(graph.phases.map((p) => ({ name: p.name, value: p.seconds })), seconds)));
  const changed = graph.steps.filter((s) => s.changed);
  parts.push(text("Every step of the compiler that changed something", changed.map((s) => `${(s.seconds * 1e3).toFixed(2).padStart(9)} ms  ${s.level.padEnd(8)}  ${s.name}${s.of ? ` (${s.of})` : ""}`).join("\n"), many(changed.length, "step")));
  parts.push(text("The program that runs all this", graph.program, "Python, as it is called"));
  if (graph.host_program) parts.push(make("p", { class: "quiet" }, `Host program: ${graph.host_program}`));
  return parts.filter(Boolean);
}

function words() {
  return make("details", {}, make("summary", {}, "What the words here mean"),
    make("p", {}, "A kernel is one compiled function that does several operations of the model at once, so that what lies between them is never written to memory. ",
      "A library call is an operation that PyTorch's own libraries run. The least possible are the bytes that have to move however it is computed: inputs once, results once. ",
      "A schedule is the order of a kernel's loops. Sizes that change from call to call count with their typical values."));
}

function search(value) {
  state.q = value;
  keep();
  const wanted = value.trim().toLowerCase();
  let found = 0;
  for (const node of document.querySelectorAll("[data-words]")) {
    const hit = !wanted || node.dataset.words.includes(wanted);
    found += hit && node.closest("#work") ? 1 : 0;
    node.classList.toggle("hidden", !hit);
    const next = node.nextElementSibling;
    if (!hit && next && node.classList.contains("row")) next.classList.add("hidden");
    if (hit && next && node.getAttribute("aria-expanded") === "true") next.classList.remove("hidden");
  }
  document.getElementById("found").textContent = wanted ? `${found} found` : "";
  window.dispatchEvent(new Event("resize"));
}

function theme(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
}

function nextTheme() {
  const dark = state.theme ? state.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  state.theme = dark ? "light" : "dark";
  theme(state.theme);
  keep();
}

function draw() {
  const page = document.getElementById("page");
  const graphs = told.graphs;
  const at = Math.min(Math.max(+state.graph || 0, 0), Math.max(graphs.length - 1, 0));
  const graph = graphs[at];
  const parts = [make("h1", {}, "How this model runs")];
  for (const b of told.breaks) parts.push(make("p", {}, make("b", {}, "The model is in several graphs: "), b.reason.split("\n").find((l) => l.trim()) || "", b.line ? make("span", { class: "from" }, ` ${b.line}`) : null));
  for (const u of told.unmatched) parts.push(make("p", { class: "bad" }, `The schedule ${u} is for no kernel here.`));
  if (!graph) {
    page.replaceChildren(...parts, make("p", {}, "There is no graph: nothing was compiled."));
    return;
  }
  const box = make("input", { type: "search", placeholder: "Search operations, lines of the model, code", value: state.q, "aria-label": "search", oninput: (e) => search(e.target.value) });
  const choice = make("select", { "aria-label": "graph", onchange: (e) => { state.graph = +e.target.value; state.open = ""; keep(); draw(); } },
    graphs.map((g, n) => make("option", { value: n, selected: n === at || null }, `graph ${n + 1} of ${graphs.length}: ${g.name}`)));
  const work = rowsOf(graph);
  const total = work.timed ? work.rows.reduce((sum, r) => sum + r.time, 0) : null;
  page.replaceChildren(...parts, ...lead(graph, total),
    make("div", { class: "bar" }, box, make("span", { id: "found", class: "quiet", style: "align-self:center" }), graphs.length > 1 ? choice : null, make("button", { type: "button", onclick: nextTheme }, "Light / dark")),
    ...workTable(graph, work), words(), ...flow(graph), ...rest(graph),
    make("p", { class: "quiet", style: "margin-top:30px" }, `Made by torch-mlc ${told.version}.`));
  if (state.q) search(state.q);
}

theme(state.theme);
if (told.compared) drawComparison(told);
else draw();
