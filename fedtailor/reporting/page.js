"use strict";
// Unpacks and draws the figures, and answers to light and dark, legends, tabs, sliders and printing.
(async () => {
  const root = document.documentElement;

  async function unpacked(name) {
    const bytes = Uint8Array.from(atob(document.getElementById(name).textContent), (letter) => letter.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  }
  const library = document.createElement("script");
  library.textContent = await unpacked("plotly");
  document.head.append(library);
  const specs = JSON.parse(await unpacked("charts"));
  const charts = Object.keys(specs).map((name) => document.getElementById("chart-" + name));
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const SCALES = {
    light: {
      sequential: [[0, "#ffffff"], [0.25, "#c9dff0"], [0.5, "#6aaed6"], [0.75, "#2172b4"], [1, "#08306b"]],
      diverging: [[0, "#1d5fa8"], [0.25, "#8fbfdf"], [0.5, "#f7f7f7"], [0.75, "#f0a58a"], [1, "#b2182b"]],
    },
    dark: {
      sequential: [[0, "#1c2027"], [0.25, "#1b3d60"], [0.5, "#24699f"], [0.75, "#5aabe0"], [1, "#dff0ff"]],
      diverging: [[0, "#7cc0ff"], [0.25, "#2d6ba3"], [0.5, "#20242b"], [0.75, "#a84a3a"], [1, "#ff9d85"]],
    },
  };
  const printing = () => root.classList.contains("printing");

  function template() {
    const css = getComputedStyle(root);
    const colour = (name) => css.getPropertyValue("--" + name).trim();
    const axis = {
      gridcolor: colour("rule"), zerolinecolor: colour("muted"), linecolor: colour("rule"), tickcolor: colour("rule"),
      title: { font: { size: 12.5, color: colour("muted") }, standoff: 8 },
    };
    return {
      layout: {
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("ink") },
        xaxis: { ...axis, zeroline: false }, yaxis: axis,
        hoverlabel: {
          bgcolor: colour("paper"), bordercolor: colour("rule"), align: "left",
          font: { color: colour("ink"), size: 12.5 },
        },
        modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("muted"), activecolor: colour("accent") },
      },
    };
  }

  function coloured(traces) {
    const scales = SCALES[dark.matches && !printing() ? "dark" : "light"];
    for (const trace of traces) {
      if (scales[trace.meta]) trace.colorscale = scales[trace.meta];
      // Whole names for who points at a cell: the axes may have them cut.
      if (trace.type === "heatmap") trace.customdata = trace.y.map((row) => trace.x.map((column) => [row, column]));
    }
    return traces;
  }

  const nameOf = (chart) => chart.id.slice("chart-".length);
  const CONFIG = {
    responsive: true, displaylogo: false, toImageButtonOptions: { format: "svg" },
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
  };

  function draw(chart) {
    const { data, layout } = specs[nameOf(chart)];
    const size = printing() ? { width: chart.clientWidth, height: chart.clientHeight } : {};
    return Plotly.react(chart, coloured(data), { ...layout, ...size, template: template() }, CONFIG);
  }
  const redraw = () => Promise.all(charts.map(draw));

  // --- legends: a method is hidden or shown in all figures at once ---

  const hidden = new Set();
  const buttons = [...document.querySelectorAll(".legend button")];
  const choices = [...new Set(buttons.map((button) => button.dataset.choice))];

  function choose() {
    for (const button of buttons) button.setAttribute("aria-pressed", String(!hidden.has(button.dataset.choice)));
    for (const panel of document.querySelectorAll(".panel[data-choice]")) {
      panel.classList.toggle("hidden", hidden.has(panel.dataset.choice));
    }
    for (const chart of charts) {
      const { data } = specs[nameOf(chart)];
      if (!data.some((trace) => trace.legendgroup)) continue;
      for (const trace of data) trace.visible = !hidden.has(trace.legendgroup);
      draw(chart);
    }
  }
  for (const button of buttons) {
    const choice = button.dataset.choice;
    button.addEventListener("click", (event) => {
      if (event.detail > 1) return;
      if (!hidden.delete(choice)) hidden.add(choice);
      choose();
    });
    button.addEventListener("dblclick", () => {
      const alone = choices.every((other) => hidden.has(other) !== (other === choice));
      hidden.clear();
      if (!alone) for (const other of choices) if (other !== choice) hidden.add(other);
      choose();
    });
  }

  // --- figures that take turns ---

  for (const tabs of document.querySelectorAll(".tabs")) {
    const all = [...tabs.children];
    const select = (chosen) => {
      for (const tab of all) {
        tab.setAttribute("aria-selected", String(tab === chosen));
        tab.tabIndex = tab === chosen ? 0 : -1;
        document.getElementById(tab.getAttribute("aria-controls")).classList.toggle("waiting", tab !== chosen);
      }
    };
    for (const tab of all) {
      tab.addEventListener("click", () => select(tab));
      tab.addEventListener("keydown", (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (!step) return;
        const next = all[(all.indexOf(tab) + step + all.length) % all.length];
        select(next);
        next.focus();
      });
    }
    select(all[0]);
  }

  // --- rounds ---

  for (const input of document.querySelectorAll(".slider input")) {
    const rounds = JSON.parse(input.dataset.frames);
    const figure = input.closest("figure");
    input.addEventListener("input", () => {
      figure.querySelector("output").textContent = rounds[input.value];
      for (const chart of figure.querySelectorAll(".chart")) {
        const { data, frames } = specs[nameOf(chart)];
        if (!frames) continue;
        data[0].z = frames[input.value];
        draw(chart);
      }
    });
  }

  // --- tables that a click on a column sorts ---

  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    const body = table.tBodies[0];
    const first = [...body.rows];
    const number = (row, place) => Number(row.cells[place].dataset.value ?? NaN);
    heads.forEach((head, place) => {
      head.querySelector("button").addEventListener("click", () => {
        const next = { none: "ascending", ascending: "descending", descending: "none" };
        const order = next[head.getAttribute("aria-sort")];
        for (const other of heads) other.setAttribute("aria-sort", other === head ? order : "none");
        const sign = order === "descending" ? -1 : 1;
        const compare = place === 0
          ? (a, b) => sign * a.cells[0].textContent.localeCompare(b.cells[0].textContent, "en", { numeric: true })
          : (a, b) => {
            const [one, other] = [number(a, place), number(b, place)];
            return Number.isNaN(one) - Number.isNaN(other) || sign * (one - other) || 0;
          };
        body.append(...(order === "none" ? first : [...first].sort(compare)));
      });
    });
  }

  // --- paper ---

  function onPaper(begins) {
    root.classList.toggle("printing", begins);
    for (const details of document.querySelectorAll("details")) details.open = begins;
    redraw();
  }
  addEventListener("beforeprint", () => onPaper(true));
  addEventListener("afterprint", () => onPaper(false));

  // --- contents: where one is ---

  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
  const watcher = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) links.get(target.id)?.classList.toggle("here", isIntersecting);
  }, { rootMargin: "-20% 0px -70% 0px" });
  for (const section of document.querySelectorAll("main > section")) watcher.observe(section);

  document.getElementById("undrawn").remove();
  document.body.classList.add("live");
  dark.addEventListener("change", redraw);
  redraw().then(() => root.setAttribute("data-drawn", charts.length));
})();
