"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const colors = ["#3b82d6", "#e8833a", "#2fa56b", "#c9528f", "#8a6fd1", "#b58a1b", "#23a2b5", "#d9534f"];
const dark = matchMedia("(prefers-color-scheme: dark)");
const config = { displayModeBar: false, responsive: true };
// Plotly reads names as its own small markup.
const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const shorten = (text, length) => (text.length > length ? text.slice(0, length - 1) + "…" : text);

function theme() {
  return dark.matches
    ? { text: "#e6eaf0", line: "#313a47", card: "#1b212a" }
    : { text: "#1c2430", line: "#dfe3e9", card: "#ffffff" };
}

function base() {
  const { text, card } = theme();
  return { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: text, size: 12 },
    hoverlabel: { bgcolor: card, font: { color: text } } };
}

function drawChart(place, chart) {
  const { line } = theme();
  const axis = { gridcolor: line, linecolor: line, zeroline: false, automargin: true };
  const several = data.runs.length > 1;
  const traces = chart.lines.map(({ run, x, y }) => ({
    x, y, type: "scatter", mode: x.length < 30 ? "lines+markers" : "lines", name: plain(shorten(data.runs[run], 40)),
    line: { color: colors[run % colors.length], width: 2 }, hovertemplate: "%{y:.6g}",
  }));
  if (!several) traces.forEach((trace) => { trace.hovertemplate += "<extra></extra>"; });
  Plotly.react(place, traces, { ...base(), margin: { l: 8, r: 12, t: 12, b: 8 }, hovermode: "x unified",
    showlegend: several, legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
    xaxis: { ...axis, title: { text: "step" } }, yaxis: { ...axis, nticks: 6, exponentformat: "power" } }, config);
}

function drawParallel(place) {
  const dimensions = data.axes.map(({ label, values, texts }) => ({ label: plain(shorten(label, 24)), values,
    ...(texts ? { tickvals: texts.map((_, i) => i), ticktext: texts.map((each) => plain(shorten(each, 16))) } : {}) }));
  const last = data.axes[data.axes.length - 1].values;
  Plotly.react(place, [{ type: "parcoords", dimensions, line: { color: last, colorscale: [[0, "#3b82d6"], [0.5, "#2fa56b"], [1, "#e8833a"]] },
    labelangle: 0, unselected: { line: { opacity: 0.1 } } }],
    { ...base(), margin: { l: 70, r: 70, t: 60, b: 24 } }, config);
}

function sortable(table) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.firstChild.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach((each) => each.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const order = (a, b) => value(a).localeCompare(value(b));
    const numbers = (a, b) => (Number(value(a)) - Number(value(b))) || order(a, b);
    table.tBodies[0].append(...[...table.tBodies[0].rows].sort((a, b) => (down ? -1 : 1) * numbers(a, b)));
  }));
}

const draws = data.charts.map((chart) => {
  const card = document.getElementById("curves").appendChild(document.createElement("div"));
  card.className = "chart";
  card.appendChild(document.createElement("h3")).textContent = chart.title;
  const place = card.appendChild(document.createElement("div"));
  place.className = "plot";
  const missing = chart.lines.reduce((sum, each) => sum + each.notFinite, 0);
  if (missing) {
    const note = card.appendChild(document.createElement("p"));
    note.className = "note";
    note.textContent = `${missing} values that are not finite are not drawn`;
  }
  return () => drawChart(place, chart);
});
const parallel = document.getElementById("parallel");
if (parallel && data.axes.length) draws.push(() => drawParallel(parallel));
document.querySelectorAll("table.sortable").forEach(sortable);
const drawAll = () => draws.forEach((draw) => draw());
drawAll();
dark.addEventListener("change", drawAll);
