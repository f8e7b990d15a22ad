"use strict";
// The page of two reports that are compared.

const CHANGES = { same: "the same in both", changed: "differs", gone: "only in the first", new: "only in the second" };

function figure(value, unit) {
  return value === null ? "?" : unit === "bytes" ? bytes(value) : unit === "seconds" ? seconds(value) : value.toLocaleString("en");
}

function drawComparison(data) {
  const page = document.getElementById("page");
  const parts = [make("h1", {}, "Two reports compared")];
  for (const o of data.only) parts.push(make("p", { class: "bad" }, `A graph is only in ${o}`));
  for (const g of data.graphs) {
    const differ = g.kernels.filter((k) => k.kind !== "same");
    parts.push(make("h2", {}, g.name));
    parts.push(make("table", {}, make("thead", {}, make("tr", {}, ["", "first", "second", "second to first"].map((h, n) => make("th", { class: n ? "number" : null }, h)))),
      make("tbody", {}, g.figures.map((f) => {
        // Times that a clock measured differ from run to run.
        const noise = f.name === "time to compile" ? 0.25 : 0;
        const ratio = f.first && f.second !== null ? f.second / f.first : null;
        return make("tr", {}, make("td", {}, f.name), make("td", { class: "number" }, figure(f.first, f.unit)), make("td", { class: "number" }, figure(f.second, f.unit)),
          make("td", { class: `number ${ratio === null || Math.abs(ratio - 1) <= noise ? "" : ratio < 1 ? "good" : "bad"}` }, ratio === null ? "" : ratio.toFixed(3)));
      }))));
    parts.push(make("p", {}, differ.length ? `${many(differ.length, "kernel")} of ${g.kernels.length} differ:` : `All ${many(g.kernels.length, "kernel")} are the same.`));
    if (differ.length) {
      parts.push(make("table", { id: "changes" }, make("thead", {}, make("tr", {}, ["kernel", "", "what", "where it is in your code"].map((h) => make("th", {}, h)))),
        make("tbody", {}, differ.map((k) => make("tr", {}, make("td", { class: "name" }, k.name), make("td", { class: k.kind === "gone" ? "bad" : k.kind === "new" ? "good" : null }, CHANGES[k.kind]),
          make("td", {}, k.what.map((w) => make("div", {}, w)), k.schedule.length ? make("details", {}, make("summary", {}, "the schedules"), make("pre", {}, k.schedule.map((l) =>
            make("div", { class: l.startsWith("+") ? "diff-add" : l.startsWith("-") ? "diff-cut" : "quiet" }, l)))) : null),
          make("td", { class: "from" }, short(k.lines[0] || "", 90)))))));
    }
  }
  page.replaceChildren(...parts, make("p", {}, make("button", { type: "button", onclick: nextTheme }, "Light / dark")));
}
