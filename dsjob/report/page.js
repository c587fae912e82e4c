"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const colors = ["#3b82d6", "#e8833a", "#2fa56b", "#d0589a", "#8f76dc", "#b58a1b", "#23a2b5", "#d9534f"];
const dashes = ["solid", "dash", "dot", "dashdot"];
const dark = matchMedia("(prefers-color-scheme: dark)");
const narrow = matchMedia("(max-width: 600px)");
const config = { displayModeBar: false, responsive: true };
const several = data.runs.length > 1;
const hidden = new Set();
let smooth = several;
// Plotly reads names as its own small markup.
const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const shorten = (text, length) => (text.length > length ? text.slice(0, length - 1) + "…" : text);
const shortenPath = (path, length) => (path.length > length ? "…" + path.slice(1 - length) : path);
const color = (run) => colors[run % colors.length];
const dash = (run) => dashes[Math.floor(run / colors.length) % dashes.length];
const make = (name, parent, className, text) => {
  const made = parent.appendChild(document.createElement(name));
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
};
const addKey = (parent, run) => {
  const key = document.createElement("span");
  key.className = "key";
  key.style.borderTopColor = color(run);
  key.style.borderTopStyle = { solid: "solid", dash: "dashed", dot: "dotted", dashdot: "dashed" }[dash(run)];
  parent.prepend(key);
};

function base() {
  const [text, line, card] = dark.matches ? ["#e6eaf0", "#313a47", "#1b212a"] : ["#1c2430", "#dfe3e9", "#ffffff"];
  return { line, text, card, layout: { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: text, size: 12 },
    showlegend: false, hoverlabel: { bgcolor: card, bordercolor: line, font: { color: text } } } };
}

// The mean over the last tenth or so, less at the beginning.
function average(values) {
  const keep = 1 - 1 / Math.max(2, Math.min(25, values.length / 10));
  let sum = 0, weight = 0;
  return values.map((value) => {
    sum = keep * sum + value;
    weight = keep * weight + 1;
    return sum / weight;
  });
}

function drawChart(place, chart) {
  const { line, layout } = base();
  const axis = { gridcolor: line, linecolor: line, zeroline: false, automargin: true, fixedrange: narrow.matches };
  // All curves of a chart alike, also those of shorter runs.
  const longest = chart.lines.reduce((most, each) => Math.max(most, each.x.length), 0);
  const traces = chart.lines.filter(({ run }) => !hidden.has(run)).flatMap(({ run, x, y }) => {
    const named = { x, type: "scatter", name: plain(shorten(data.runs[run], 40)),
      hovertemplate: "%{y:.6~g}" + (several ? "" : "<extra></extra>") };
    const drawn = { color: color(run), dash: dash(run), width: 2 };
    const mode = longest < 30 || x.length === 1 ? "lines+markers" : "lines";
    if (!smooth || !chart.noisy || longest < 30) return [{ ...named, y, mode, line: drawn }];
    return [{ ...named, y, mode, line: { ...drawn, width: 1 }, opacity: 0.25, hoverinfo: "skip", hovertemplate: null },
      { ...named, y: average(y), mode, line: drawn }];
  });
  // Not Math.max(...values): the points of many runs are more arguments than a call takes.
  let low = Infinity, high = -Infinity, largest = 0;
  for (const { run, y } of chart.lines) for (const value of y) {
    largest = Math.max(largest, Math.abs(value));
    if (!hidden.has(run)) [low, high] = [Math.min(low, value), Math.max(high, value)];
  }
  // Around a constant, Plotly's axis goes from -1 to 1 above and below: a learning rate of 0.01 would look like 0.
  const range = low === high && low !== 0 ? [Math.min(0, 2 * low), Math.max(0, 2 * low)] : undefined;
  // 1.5k and 3.1M, but 1e-5: nobody reads 10µ.
  const format = largest >= 1e4 && largest < 1e15 ? "SI" : "e";
  Plotly.react(place, traces, { ...layout, margin: { l: 8, r: 14, t: 12, b: 8 }, hovermode: "x unified",
    xaxis: { ...axis, nticks: narrow.matches ? 5 : 8, exponentformat: "SI", title: { text: "step", standoff: 6 } },
    yaxis: { ...axis, range, nticks: 6, exponentformat: format, title: { text: plain(chart.unit), standoff: 8 } } }, config);
}

// Where each value is on its axis, from 0 to 1. A run without a result has null there.
function place(values, texts) {
  const known = values.filter((each) => each !== null), least = Math.min(...known);
  const scale = !texts && least > 0 && Math.max(...known) >= 10 * least ? Math.log : Number;
  const low = scale(least), high = scale(Math.max(...known));
  return values.map((each) => (each === null ? null : high > low ? (scale(each) - low) / (high - low) : 0.5));
}

// Parallel coordinates: upright axes side by side, or on a phone, lying axes below each other.
function drawParallel(where) {
  const { text, card, layout } = base();
  const lying = narrow.matches, last = data.axes.length - 1;
  const places = data.axes.map(({ values, texts }) => place(values, texts));
  const best = data.axes[last].better === "max" ? 1 : 0;
  const distance = (run) => (places[last][run] === null ? 1 : Math.abs(places[last][run] - best));
  const shade = (run) => {
    const share = distance(run), [near, far] = dark.matches ? [[255, 196, 84], [96, 112, 190]] : [[214, 90, 20], [120, 140, 205]];
    return `rgb(${near.map((each, i) => Math.round(each + (far[i] - each) * share)).join(",")})`;
  };
  const order = data.runs.map((_, run) => run).filter((run) => !hidden.has(run))
    .sort((a, b) => distance(b) - distance(a)); // the best on top
  const traces = order.map((run) => {
    const along = data.axes.map((_, i) => (lying ? last - i : i)), across = places.map((each) => each[run]);
    return { x: lying ? across : along, y: lying ? along : across, type: "scatter", mode: "lines+markers",
      line: { color: data.runs.length > colors.length ? shade(run) : color(run), width: 2.5 }, marker: { size: 7 },
      name: plain(shorten(data.runs[run], 40)), hovertemplate: "%{customdata}",
      customdata: data.axes.map(({ label, values, texts }) => plain(shorten(`${label}: ${texts ? texts[values[run]] : show(values[run])}`, 60))) };
  });
  const shapes = data.axes.map((_, i) => ({ type: "line", layer: "below", line: { color: text, width: 1 },
    ...(lying ? { x0: 0, x1: 1, y0: last - i, y1: last - i } : { x0: i, x1: i, y0: 0, y1: 1 }) }));
  const annotations = data.axes.flatMap((each, i) => label(each, places[i], i, lying, last)).map((each) => ({ ...each, bgcolor: card }));
  const bare = { showgrid: false, zeroline: false, showticklabels: false, fixedrange: true };
  where.style.height = lying ? `${50 + 84 * data.axes.length}px` : "360px";
  Plotly.react(where, traces, { ...layout, shapes, annotations, hovermode: "closest",
    margin: lying ? { l: 18, r: 18, t: 8, b: 8 } : { l: 20, r: 20, t: 40, b: 24 },
    xaxis: { ...bare, range: lying ? [-0.06, 1.06] : [-0.45, last + 0.45] },
    yaxis: { ...bare, range: lying ? [-0.6, last + 0.65] : [-0.1, 1.08] } }, config);
}

const show = (value) => (value === null ? "–" : Math.abs(value) >= 1e4 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(2).replace(/\.?0+e/, "e").replace("+", "") : String(Number(value.toPrecision(4))));

// The name of an axis, and its values: those at the ends, and as many others as there is room for.
function label({ label: name, values, texts }, places, index, lying, last) {
  const note = { showarrow: false, xref: "x", yref: "y", font: { size: 11 } };
  const at = new Map();
  values.forEach((value, run) => value === null || at.set(places[run], texts ? texts[value] : show(value)));
  const ends = [Math.min(...at.keys()), Math.max(...at.keys())];
  const gap = lying ? 0.2 : 0.06, shown = [...at].filter(([where]) => ends.includes(where));
  for (const each of at) if (shown.every(([where]) => Math.abs(where - each[0]) >= gap)) shown.push(each);
  const length = lying ? Math.floor(40 / Math.max(2, shown.length)) : 18;
  const named = { ...note, text: `<b>${plain(shortenPath(name, lying ? 44 : Math.max(12, Math.floor(150 / (last + 1)))))}</b>`, font: { size: 12 } };
  return lying
    ? [{ ...named, x: -0.03, y: last - index, xanchor: "left", yanchor: "bottom", yshift: 9 },
      ...shown.map(([where, text]) => ({ ...note, text: plain(shorten(text, length)), x: where, y: last - index, yanchor: "top", yshift: -7,
        xanchor: where < 0.1 ? "left" : where > 0.9 ? "right" : "center", xshift: where < 0.1 ? -8 : where > 0.9 ? 8 : 0 }))]
    : [{ ...named, x: index, y: 1, yanchor: "bottom", yshift: 20 },
      ...shown.map(([where, text]) => ({ ...note, text: plain(shorten(text, length)), x: index, y: where, xanchor: "left", xshift: 8 }))];
}

function sortable(table) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.firstChild.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    heads.forEach((each) => each.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down < 0 ? "descending" : "ascending");
    const cell = (row) => row.cells[column], isNumber = (row) => "value" in cell(row).dataset;
    // Numbers before texts, and what is missing last.
    const rank = (row) => (isNumber(row) ? 0 : cell(row).textContent === "–" ? 2 : 1);
    const order = (a, b) => (isNumber(a) && isNumber(b) ? Number(cell(a).dataset.value) - Number(cell(b).dataset.value)
      : cell(a).textContent.localeCompare(cell(b).textContent, undefined, { numeric: true }));
    table.tBodies[0].append(...[...table.tBodies[0].rows].sort((a, b) => rank(a) - rank(b) || down * order(a, b)));
  }));
  [...table.tBodies[0].rows].forEach((row, run) => addKey(row.cells[0], run));
}

function addControls(parent) {
  data.runs.forEach((name, run) => {
    if (!several) return;
    const button = make("button", parent, "", shorten(name, 40));
    button.type = "button";
    button.setAttribute("aria-pressed", "true");
    addKey(button, run);
    button.addEventListener("click", () => {
      if (!hidden.delete(run)) hidden.add(run);
      button.setAttribute("aria-pressed", String(!hidden.has(run)));
      drawAll();
    });
  });
  const box = make("label", parent, "", "smooth curves");
  const check = document.createElement("input");
  check.type = "checkbox";
  check.checked = smooth;
  box.prepend(check);
  check.addEventListener("change", () => {
    smooth = check.checked;
    drawAll();
  });
}

const curves = document.getElementById("curves");
const draws = data.charts.map((chart) => {
  const card = make("div", curves, "chart");
  make("h3", card, "", chart.title);
  const where = make("div", card, "plot");
  const missing = chart.lines.reduce((sum, each) => sum + each.notFinite, 0);
  if (missing) make("p", card, "note", `Not drawn: ${missing} value${missing > 1 ? "s" : ""} (nan or infinite).`);
  return () => drawChart(where, chart);
});
const parallel = document.getElementById("parallel");
if (parallel) draws.push(() => drawParallel(parallel));
document.querySelectorAll("table.sortable").forEach(sortable);
if (data.charts.length) addControls(document.getElementById("controls"));
const drawAll = () => draws.forEach((draw) => draw());
drawAll();
for (const query of [dark, narrow]) query.addEventListener("change", drawAll);
