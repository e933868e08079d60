// What every page has: choices kept in the address, elements shown by them, charts, sorted tables, and the colours.
//
// A control is an element with data-choice="name"; an element with data-when="name:value other:a,b" is shown while
// every named choice has one of its values, one with data-none="table" while no row of that table is. The address keeps all choices behind its "#": "#anchor&gpu=h200&size=4096".
// Page scripts use window.site: choices, choose(name, value), onChoice(function), and charts' views by element.
"use strict";
(() => {
  const ANY = "all";
  const VEGA = new URL("vega.js", document.currentScript.src).href;
  const listeners = [];
  const controls = [...document.querySelectorAll("[data-choice]")];
  const still = matchMedia("(prefers-reduced-motion: reduce)");

  // --- choices -----------------------------------------------------------------------------------------------------
  const first = {};
  for (const control of controls) {
    const name = control.dataset.choice;
    if (control.type === "radio") { if (control.checked) first[name] = control.value; }
    else first[name] = control.type === "checkbox" ? String(control.checked) : control.value;
  }

  function read() {
    const parts = location.hash.slice(1).split("&").filter(Boolean);
    const anchor = parts.find((part) => !part.includes("=")) || "";
    const given = Object.fromEntries(new URLSearchParams(parts.filter((part) => part.includes("=")).join("&")));
    return { anchor: decodeURIComponent(anchor), given };
  }

  function offered(name, value) {
    const own = controls.filter((control) => control.dataset.choice === name);
    if (!own.length) return true;
    return own.some((control) => {
      if (control.tagName === "SELECT") return [...control.options].some((option) => option.value === value);
      if (control.type === "radio") return control.value === value;
      if (control.type === "checkbox") return value === "true" || value === "false";
      if (control.type === "range") return Number(control.min) <= Number(value) && Number(value) <= Number(control.max);
      return true;
    });
  }

  const choices = { ...first };
  let given = {};

  function take() {
    given = read().given;
    for (const name of Object.keys(choices)) delete choices[name];
    Object.assign(choices, first);
    for (const [name, value] of Object.entries(given)) if (offered(name, value)) choices[name] = value;
  }

  function address(anchor) {
    const kept = Object.entries(choices).filter(([name, value]) => value !== first[name]);
    const others = Object.entries(given).filter(([name]) => !(name in choices));
    const text = new URLSearchParams([...kept, ...others]).toString();
    return "#" + [anchor ? encodeURIComponent(anchor) : "", text].filter(Boolean).join("&");
  }

  function matches(element) {
    return element.dataset.when.trim().split(/\s+/).every((term) => {
      const [name, values] = [term.slice(0, term.indexOf(":")), term.slice(term.indexOf(":") + 1)];
      return !(name in choices) || choices[name] === ANY || values.split(",").some((value) => value === choices[name] || value === ANY);
    });
  }

  take();

  function show() {
    for (const control of controls) {
      const value = choices[control.dataset.choice];
      if (control.type === "radio") control.checked = control.value === value;
      else if (control.type === "checkbox") control.checked = value === "true";
      else if (control.value !== value) control.value = value;
    }
    for (const element of document.querySelectorAll("[data-when]")) element.hidden = !matches(element);
    for (const element of document.querySelectorAll("[data-none]")) {
      const body = document.getElementById(element.dataset.none).tBodies[0];
      element.hidden = [...body.rows].some((row) => !row.hidden);
    }
    for (const listener of listeners) listener(choices);
    passOn();
  }

  function choose(name, value) {
    choices[name] = String(value);
    history.replaceState(null, "", address(read().anchor));
    show();
  }

  // Links to other pages carry the GPU along, so that it is chosen once.
  function passOn() {
    if (!("gpu" in choices)) return;
    for (const link of document.querySelectorAll("a[href]")) {
      const href = link.getAttribute("href");
      if (/^[a-z]+:/i.test(href) || href.startsWith("#") || link.hasAttribute("download")) continue;
      const [path, hash] = [href.split("#")[0], href.split("#")[1] || ""];
      const parts = hash.split("&").filter((part) => part && !part.startsWith("gpu="));
      if (choices.gpu !== first.gpu) parts.push(`gpu=${encodeURIComponent(choices.gpu)}`);
      link.setAttribute("href", parts.length ? `${path}#${parts.join("&")}` : path);
    }
  }

  for (const control of controls) {
    control.addEventListener(control.type === "range" || control.type === "search" ? "input" : "change", () => {
      choose(control.dataset.choice, control.type === "checkbox" ? control.checked : control.value);
    });
  }

  function jump() {
    const target = read().anchor && document.getElementById(read().anchor);
    if (target) {
      for (let box = target.closest("details"); box; box = box.parentElement.closest("details")) box.open = true;
      target.scrollIntoView({ behavior: still.matches ? "auto" : "smooth" });
    }
  }
  // Links inside the page keep its choices.
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.('a[href^="#"]');
    if (!link) return;
    event.preventDefault();
    history.pushState(null, "", address(decodeURIComponent(link.getAttribute("href").slice(1))));
    jump();
    document.getElementById(read().anchor)?.focus({ preventScroll: true });
  });
  addEventListener("hashchange", () => { take(); show(); jump(); });
  addEventListener("popstate", () => { take(); show(); });

  window.site = {
    choices,
    choose,
    onChoice(listener) { listeners.push(listener); listener(choices); },
    views: new Map(),
    loadScript,
  };

  // --- charts ------------------------------------------------------------------------------------------------------
  const loading = new Map();
  function loadScript(url) {
    if (!loading.has(url)) {
      loading.set(url, new Promise((resolve, reject) => {
        const script = document.createElement("script");
        script.src = url;
        script.onload = resolve;
        script.onerror = () => reject(new Error(`cannot load ${url}`));
        document.head.append(script);
      }));
    }
    return loading.get(url);
  }

  function colour(name) {
    const probe = document.createElement("span");
    probe.style.color = `var(--${name})`;
    document.body.append(probe);
    const found = getComputedStyle(probe).color;
    probe.remove();
    return found;
  }

  function look(stacked) {
    const [ink, quiet, line] = ["ink", "quiet", "line"].map(colour);
    const axis = { labelColor: quiet, titleColor: ink, gridColor: line, domainColor: line, tickColor: line, titleFontWeight: 500 };
    const font = getComputedStyle(document.body).fontFamily;
    return {
      background: null, font, aria: false,
      view: { stroke: null },
      axis: { ...axis, labelFontSize: 12, titleFontSize: 12, titlePadding: 8 },
      legend: {
        orient: "bottom", direction: "horizontal", columns: 6, symbolLimit: 40, titleLimit: 400, labelLimit: 260,
        labelColor: ink, titleColor: quiet, labelFontSize: 12, titleFontSize: 12,
        ...(stacked && { layout: { bottom: { direction: "vertical" } } }),
      },
      header: { labelColor: ink, titleColor: quiet, labelFontSize: 12 },
      title: { color: ink },
      text: { color: ink }, rule: { color: quiet },
      line: { strokeWidth: 2 }, point: { size: 60, filled: true },
      range: { category: [1, 2, 3, 4, 5, 6, 7].map((place) => colour(`series-${place}`)) },
    };
  }

  // On a phone: names below each other instead of over each other, legends in few columns.
  const NARROW = 560;
  function fitPhone(spec) {
    for (const part of [spec, ...(spec.layer || []), ...(spec.spec?.layer || [])]) {
      const axis = part.encoding?.x?.axis;
      if (axis?.labelAngle) Object.assign(axis, { labelAngle: -90, labelFontSize: 10 });
      for (const channel of ["color", "shape", "strokeDash"]) {
        const own = part.encoding?.[channel];
        if (own && own.field && own.legend !== null) own.legend = { ...own.legend, columns: 3, labelLimit: 110 };
      }
    }
    if (spec.columns) spec.columns = 1;
  }
  // Panels side by side share the width; Vega-Lite fits a single one by itself.
  function fitPanels(spec, width) {
    const columns = spec.columns || 1;
    spec.spec.width = Math.max(140, Math.floor(width / columns) - 62);
    delete spec.width;
  }

  // Data come column by column: see reports/web/charts.py, packed.
  const fed = new WeakMap(); // specifications of figures whose rows a page's script made
  function specOf(figure) {
    const spec = fed.has(figure)
      ? structuredClone(fed.get(figure))
      : JSON.parse(figure.querySelector("script[type='application/json']").textContent);
    const packed = spec.data?.packed;
    if (!packed) return spec; // a page's own script wrote it
    const full = Object.entries(packed.columns).map(([name, own]) => [name, Array.isArray(own) ? own : own.at.map((place) => own.of[place])]);
    spec.data = { values: Array.from({ length: packed.rows }, (_, row) => Object.fromEntries(full.map(([name, own]) => [name, own[row]]))) };
    return spec;
  }

  function written(value) {
    if (value === null || value === undefined) return "–";
    return typeof value === "number" && !Number.isInteger(value) ? String(Number(value.toPrecision(4))) : String(value);
  }

  function list(box) {
    const columns = Object.entries(JSON.parse(box.dataset.columns));
    const picked = box.dataset.picked.split(" ").filter(Boolean);
    const figure = box.closest("figure");
    const scroll = Object.assign(document.createElement("div"), { className: "scroll", tabIndex: 0 });
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", `Figures of the chart: ${figure.querySelector(".chart-title").textContent}`);
    const table = scroll.appendChild(document.createElement("table"));
    const head = table.createTHead().insertRow();
    for (const [, heading] of columns) {
      head.append(Object.assign(document.createElement("th"), { textContent: heading, scope: "col" }));
    }
    const body = table.createTBody();
    for (const own of specOf(figure).data.values) {
      const row = body.insertRow();
      if (picked.length) row.dataset.when = picked.map((name) => `${name}:${own[name]}`).join(" ");
      for (const [name] of columns) {
        const cell = row.insertCell();
        cell.textContent = written(own[name]);
        if (typeof own[name] === "number") { cell.className = "num"; cell.dataset.value = own[name]; }
      }
    }
    box.append(scroll);
    sortable(table);
    show();
  }
  for (const box of document.querySelectorAll("details.behind")) {
    box.addEventListener("toggle", () => { if (box.open && !box.querySelector("table")) list(box); });
  }

  async function draw(figure) {
    const place = figure.querySelector(".vega");
    await loadScript(VEGA);
    const spec = specOf(figure);
    // Names of colours, "var(--series-1)", are written as what they are now.
    const text = JSON.stringify(spec).replace(/var\(--([\w-]+)\)/g, (_, name) => colour(name));
    const made = JSON.parse(text);
    if (place.clientWidth < NARROW) fitPhone(made);
    if (made.facet) fitPanels(made, place.clientWidth);
    for (const param of made.params || []) if (param.name in choices) param.value = choices[param.name];
    window.site.views.get(figure)?.finalize();
    const result = await window.vegaEmbed(place, made, {
      renderer: "svg", actions: false, config: look(place.clientWidth < NARROW && !made.facet), tooltip: { theme: "custom" },
      logLevel: 1, // errors alone: a choice that leaves nothing to draw is none
    });
    window.site.views.set(figure, result.view);
    await result.view.runAsync();
    place.querySelector("svg").setAttribute("aria-hidden", "true"); // the element around it has the text
    figure.dataset.drawn = "true";
  }

  const figures = [...document.querySelectorAll("figure.chart")];
  const seen = new Set();
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting && !seen.has(entry.target)) { seen.add(entry.target); draw(entry.target); }
    }
  }, { rootMargin: "300px" });
  for (const figure of figures) watcher.observe(figure);
  const redraw = () => { for (const figure of seen) draw(figure); };
  // A page that makes a chart's rows itself gives them here, with what else changes in its specification.
  window.site.feed = (figure, values, more = {}) => {
    const spec = JSON.parse(figure.querySelector("script[type='application/json']").textContent);
    fed.set(figure, { ...spec, ...more, data: { values } });
    if (seen.has(figure)) draw(figure);
  };
  listeners.push(() => {
    for (const view of window.site.views.values()) {
      for (const name of Object.keys(choices)) {
        try { view.signal(name); } catch { continue; }
        view.signal(name, choices[name]);
      }
      view.runAsync();
    }
  });

  // --- colours -----------------------------------------------------------------------------------------------------
  const themes = { auto: ["Auto", "as the system has them"], light: ["Light", "light"], dark: ["Dark", "dark"] };
  const button = document.getElementById("theme");
  const theme = () => document.documentElement.dataset.theme || "auto";
  function label() {
    button.textContent = themes[theme()][0];
    button.setAttribute("aria-label", `Colours: ${themes[theme()][1]}`);
  }
  button.addEventListener("click", () => {
    const names = Object.keys(themes);
    const next = names[(names.indexOf(theme()) + 1) % names.length];
    if (next === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    try { localStorage.setItem("theme", next); } catch { /* it holds for this page alone */ }
    label();
    redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  label();

  // --- sorted tables -----------------------------------------------------------------------------------------------
  function worth(cell) {
    if (!cell) return "";
    const text = cell.dataset.value ?? (cell.firstChild?.textContent ?? "").trim(); // what stands below it is an interval
    const number = Number(text.replace(/[,%×µ³\s]/g, ""));
    return text === "" || Number.isNaN(number) ? text : number;
  }
  function compare(a, b) {
    const words = [typeof a === "string", typeof b === "string"];
    if (words[0] !== words[1]) return words[0] ? 1 : -1; // what was not measured goes last
    return words[0] ? a.localeCompare(b) : a - b;
  }
  function sortable(table) {
    const headings = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
    const body = table.tBodies[0];
    headings.forEach((heading, column) => {
      if (heading.dataset.fixed !== undefined) return;
      const press = document.createElement("button");
      press.type = "button";
      press.append(...heading.childNodes);
      heading.append(press);
      press.addEventListener("click", () => {
        const down = heading.getAttribute("aria-sort") === "ascending";
        for (const other of headings) other.removeAttribute("aria-sort");
        heading.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = [...body.rows].sort((a, b) => compare(worth(a.cells[column]), worth(b.cells[column])) * (down ? -1 : 1));
        body.append(...rows);
        if (table.id) choose(`sort-${table.id}`, `${down ? "-" : ""}${column + 1}`);
      });
    });
    const order = table.id && read().given[`sort-${table.id}`];
    const column = order && headings[Math.abs(Number(order)) - 1]?.querySelector("button");
    if (column) { column.click(); if (order.startsWith("-")) column.click(); }
  }
  for (const table of document.querySelectorAll("table.sortable")) sortable(table);

  show();
  jump();
})();
