"use strict";
// What the page is made of: elements, figures as people read them, and the drawings.

/** An element: text becomes a text node, so nothing that a report tells is ever read as HTML. */
function make(tag, attributes, ...children) {
  const svg = ["svg", "path", "rect", "circle", "text", "line", "title", "g"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) node.append(child);
  }
  return node;
}

function bytes(n) {
  if (n === null || n === undefined) return "?";
  for (const unit of ["B", "KiB", "MiB"]) {
    if (Math.abs(n) < 1024) return `${unit === "B" || Math.abs(n) >= 100 ? Math.round(n) : n.toFixed(1)} ${unit}`;
    n /= 1024;
  }
  return `${n.toFixed(1)} GiB`;
}

function seconds(s) {
  if (s === null || s === undefined) return "?";
  for (const [unit, size] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]) {
    if (s >= size) return `${(s / size).toPrecision(3)} ${unit}`;
  }
  return `${(s * 1e9).toFixed(0)} ns`;
}

function many(n, one, more) {
  return `${n.toLocaleString("en")} ${n === 1 ? one : more || one + "s"}`;
}

function short(text, most) {
  return text.length > most ? text.slice(0, most - 1) + "…" : text;
}

// Names of PyTorch's own that say how an operation is done, and not what it does.
const SPOKEN = [
  [/^((native|cudnn|miopen)_)?batch_norm(_.*)?$/, "batch_norm"],
  [/^(native_)?(layer_norm|group_norm)$/, "$2"],
  [/^scaled_dot_product_(.*_)?attention(_.*)?$/, "attention"],
  [/^(mm|addmm|bmm|baddbmm|int_mm)$/, "matrix product"],
  [/^linear_pointwise$/, "linear"],
  [/^(mkldnn_)?convolution(_pointwise|_overrideable)?$/, "convolution"],
  [/^(.*_pool\dd)_with_indices$/, "$1"],
  [/^threshold$/, "relu"],
  [/^embedding_dense$/, "embedding"],
  [/^to_copy$/, "change of type"],
  [/^clone$/, "copy"],
  [/^pow$/, "power"],
];

/** An operation in a few words: without the library that it is of and the form of its arguments. Others' stay as they are. */
function plainName(op) {
  if (!/^(aten|prims|mkldnn|mkldnn_prepacked|onednn)(::|\.)/.test(op) && /::|\./.test(op)) return op.replace(/\.default$/, "");
  const name = op.replace(/^\w+::/, "").replace(/^aten\./, "").replace(/\..*$/, "").replace(/^_+/, "");
  const back = /^(.+)_backward(_.*)?$/.exec(name), base = back ? back[1] : name;
  const found = SPOKEN.find(([form]) => form.test(base));
  const told = found ? base.replace(found[0], found[1]) : base;
  return back ? `gradient of ${told}` : told;
}

/** What a kernel computes, in a few words and in its order: where there is room for some alone, arithmetic is left out first. */
function operations(ops, most) {
  const names = [...new Set(ops.map((op) => plainName(op)))];
  const telling = names.filter((n) => !/^(add|sub|mul|div|neg|power|copy|change of type|where)$/.test(n));
  const kept = new Set([...telling, ...names.filter((n) => !telling.includes(n))].slice(0, most));
  const shown = names.filter((n) => kept.has(n)).join(", ");
  return names.length > kept.size ? `${shown} and ${names.length - kept.size} more` : shown;
}

/** Memory over the calls of a run, as steps. */
function memoryChart(calls, onpick) {
  const width = 900, height = 170, left = 70, bottom = 22, top = 14;
  const most = Math.max(1, ...calls.map((c) => c.held));
  const x = (k) => left + ((width - left - 8) * k) / calls.length;
  const y = (n) => height - bottom - ((height - bottom - top) * n) / most;
  let line = `M${x(0)} ${y(0)}`;
  calls.forEach((c, k) => { line += `L${x(k)} ${y(c.held)}L${x(k + 1)} ${y(c.held)}`; });
  const ground = `${line}L${x(calls.length)} ${y(0)}Z`;
  const at = calls.findIndex((c) => c.held === most);
  const hits = calls.map((c, k) => make("rect", {
    x: x(k), y: top, width: Math.max(x(k + 1) - x(k), 0.5), height: height - bottom - top, fill: "transparent", onclick: () => onpick(c),
  }, make("title", {}, `${k + 1}. ${c.name}: ${bytes(c.held)}`)));
  return make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `memory over ${calls.length} calls, at most ${bytes(most)}` },
    make("path", { class: "axis", d: `M${left} ${top}V${y(0)}H${width - 8}` }),
    make("path", { class: "fill", d: ground }), make("path", { class: "stroke", d: line }),
    make("text", { x: left - 6, y: top + 8, "text-anchor": "end", class: "quiet" }, bytes(most)),
    make("text", { x: left - 6, y: y(0), "text-anchor": "end", class: "quiet" }, "0"),
    make("text", { x: left, y: height - 5, class: "quiet" }, "first call"),
    make("text", { x: width - 8, y: height - 5, "text-anchor": "end", class: "quiet" }, "last call"),
    make("text", { x: Math.min(Math.max(x(at + 0.5), left + 60), width - 80), y: top - 3, "text-anchor": "middle" }, `most: call ${at + 1}`),
    hits);
}

/** Operations for each byte against operations a second: under the slope memory is the limit, under the level arithmetic. */
function roofline(kernels, roof, onpick) {
  const points = kernels.filter((k) => k.operations > 0 && k.least > 0);
  if (!points.length || !roof) return null;
  const width = 900, height = 280, left = 90, bottom = 34, top = 12;
  const ridge = roof.operations / roof.bandwidth;
  const rate = (k) => (k.seconds ? k.operations / k.seconds : Math.min(roof.operations, (k.operations / k.moved) * roof.bandwidth));
  const xs = points.map((k) => k.operations / k.least);
  const low = Math.min(ridge / 8, ...xs) / 1.6, high = Math.max(ridge * 8, ...xs) * 1.6;
  const ceiling = roof.operations * 1.8, floor = Math.min(low * roof.bandwidth, ...points.map(rate)) / 1.5;
  const x = (v) => left + ((width - left - 14) * Math.log(v / low)) / Math.log(high / low);
  const y = (v) => height - bottom - ((height - bottom - top) * Math.log(v / floor)) / Math.log(ceiling / floor);
  const dots = points.map((k, n) => make("circle", {
    cx: x(xs[n]), cy: y(Math.max(rate(k), floor)), r: 6, class: "dot", tabindex: 0, onclick: () => onpick(k),
  }, make("title", {}, `${k.name}: ${xs[n].toPrecision(3)} operations a byte, ${(rate(k) / 1e9).toPrecision(3)} billion operations a second`)));
  return make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "kernels against what the machine can do" },
    make("path", { class: "axis", d: `M${left} ${top}V${height - bottom}H${width - 14}` }),
    make("path", { class: "stroke", d: `M${x(low)} ${y(Math.max(low * roof.bandwidth, floor))}L${x(ridge)} ${y(roof.operations)}H${x(high)}` }),
    make("text", { x: x(high) - 4, y: y(roof.operations) - 6, "text-anchor": "end", class: "quiet" },
      `${(roof.operations / 1e9).toPrecision(3)} billion operations a second`),
    make("text", { x: left + 6, y: height - bottom - 8, class: "quiet" }, `slope: ${bytes(roof.bandwidth)} a second`),
    make("text", { x: (left + width) / 2, y: height - 6, "text-anchor": "middle", class: "quiet" }, "operations for each byte that has to move"),
    make("text", { x: 14, y: height / 2, "text-anchor": "middle", class: "quiet", transform: `rotate(-90 14 ${height / 2})` }, "operations a second"),
    dots);
}

/** Shares of a whole as bars with names, the largest first. */
function barChart(items, text) {
  const most = Math.max(1e-12, ...items.map((i) => i.value));
  return make("table", {}, make("tbody", {}, [...items].sort((a, b) => b.value - a.value).map((i) => make("tr", {},
    make("td", { style: "width:150px" }, i.name),
    make("td", { class: "number", style: "width:90px" }, text(i.value)),
    make("td", {}, make("span", { class: "share", style: `width:${(100 * i.value) / most}%` }))))));
}

/** The lines from each call to those that read its results: neighbours in front of the boxes, others further out. */
function connections(calls, boxes, gutter, svg) {
  const ends = calls.flatMap((c, to) => c.reads.map((from) => ({ from, to }))).sort((a, b) => (a.to - a.from) - (b.to - b.from));
  const lanes = [];
  const paths = [];
  const middle = (k) => boxes[k].offsetTop + boxes[k].offsetHeight / 2;
  for (const { from, to } of ends) {
    if (!boxes[from].offsetHeight || !boxes[to].offsetHeight) continue; // not shown
    let lane = 0;
    while (lane < lanes.length && lanes[lane].some((e) => e.from < to && from < e.to)) lane += 1;
    (lanes[lane] = lanes[lane] || []).push({ from, to });
    const out = gutter - 10 - Math.min(lane, 11) * ((gutter - 24) / 12), a = middle(from) + 5, b = middle(to) - 5;
    const path = make("path", { d: `M${gutter} ${a}H${out + 6}Q${out} ${a} ${out} ${a + 6}V${b - 6}Q${out} ${b} ${out + 6} ${b}H${gutter}m-5 -3.5l5 3.5l-5 3.5` });
    path.dataset.from = from;
    path.dataset.to = to;
    paths.push(path);
  }
  svg.replaceChildren(...paths);
  return paths;
}
