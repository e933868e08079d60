// The comparison of two kernels. What is known comes in scripts (compare/index.js, compare/stepN.js) that hold deflated
// JSON; the choices left, right, show, plain, preamble, equal and wrap are in the address (site.js).
"use strict";
(async () => {
  const HERE = document.currentScript.src;
  const PARTS = ["step", "variant", "product", "gpu", "tile"]; // in the order in which one narrows the next
  const SIDES = { left: "Left", right: "Right" };
  const SLOW_MS = 1500; // after which a difference is taken as it is found quickly, less finely
  const LONG = 160; // lines of both sides, up to which equal ones are shown
  const LARGE = 20000; // characters of a changed block, beyond which no words are marked in it
  const NONE = "–";
  const byId = (identity) => document.getElementById(identity);

  async function unpack(name) {
    const bytes = Uint8Array.from(atob(window.comparison[name]), (sign) => sign.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).text();
  }

  async function load(name) {
    await site.loadScript(new URL(`../compare/${name}.js`, HERE).href);
    return unpack(name);
  }

  let viewer;
  async function loadViewer() {
    const script = new Blob([await load("codemirror")], { type: "text/javascript" });
    await site.loadScript(URL.createObjectURL(script));
  }

  const data = JSON.parse(await unpack("index"));
  for (const kernel of data.kernels) kernel.tiles = kernel.tile + (kernel.stages > 1 ? `, ${kernel.stages} stages` : "");

  // --- which two ---------------------------------------------------------------------------------------------------
  // "5:async~1024x1024x1024~float32.nn~32x64x16/4x4~3~h200" names a kernel; parts may be missing: "5", "5:sync", "10~4096x4096x4096".
  function wanted(text) {
    const [first, ...rest] = text.split("~");
    const [step, variant] = first.split(":");
    return { step: Number(step), variant, rest };
  }

  function find(text) {
    const exact = data.kernels.find((kernel) => kernel.id === text);
    if (exact) return { kernel: exact, given: true };
    const { step, variant, rest } = wanted(text);
    const own = data.kernels.filter((kernel) => kernel.step === step);
    const worth = (kernel) => {
      const parts = kernel.id.split("~").slice(1);
      const hits = rest.filter((part) => parts.includes(part)).length;
      return [variant === undefined ? 0 : kernel.variant === variant, hits, kernel.text !== undefined, kernel.size === 1024,
        kernel.default, kernel.speed !== undefined, kernel.gpu === data.kernels[0].gpu].map(Number);
    };
    const kernel = best(own.length ? own : data.kernels, worth);
    const parts = kernel.id.split("~");
    const given = kernel.step === step && [undefined, kernel.variant].includes(variant) && rest.every((part) => parts.includes(part));
    return { kernel, given };
  }

  function best(items, worth) {
    const before = (a, b) => { for (let i = 0; i < a.length; i++) if (a[i] !== b[i]) return a[i] > b[i]; return false; };
    let found = items[0];
    let most = worth(found);
    for (const item of items.slice(1)) {
      const own = worth(item);
      if (before(own, most)) [found, most] = [item, own];
    }
    return found;
  }

  function value(kernel, part) {
    return String(part === "tile" ? kernel.tiles : kernel[part]);
  }

  function label(kernel, part) {
    if (part === "step") return data.steps[kernel.step];
    if (part === "gpu") return data.gpus[kernel.gpu];
    return value(kernel, part) + (part === "tile" && kernel.default ? " (default)" : "");
  }

  function fill(side, kernel) {
    let left = data.kernels;
    for (const part of PARTS) {
      const select = byId(side).querySelector(`[data-part="${part}"]`);
      const options = new Map();
      for (const other of left) {
        const own = value(other, part);
        if (!options.has(own) || (part === "tile" && other.default)) options.set(own, label(other, part));
      }
      select.replaceChildren(...[...options].map(([own, text]) => new Option(text, own, false, own === value(kernel, part))));
      left = left.filter((other) => value(other, part) === value(kernel, part));
    }
  }

  // Changing a part keeps those before it, and of those after it what there is.
  function change(side, part, own) {
    const now = chosen[side].kernel;
    const place = PARTS.indexOf(part);
    const fits = data.kernels.filter((kernel) =>
      value(kernel, part) === own && PARTS.slice(0, place).every((other) => value(kernel, other) === value(now, other)));
    const size = (kernel) => Number(kernel.size === now.size);
    const kernel = best(fits, (other) => [
      ...PARTS.slice(place + 1).map((after) => (after === "product" ? 2 * size(other) : 0) + Number(value(other, after) === value(now, after))),
      Number(other.default), Number(other.speed !== undefined)]);
    site.choose(side, kernel.id);
  }

  const chosen = {};
  for (const side of Object.keys(SIDES)) {
    for (const part of PARTS) {
      const select = byId(side).querySelector(`[data-part="${part}"]`);
      select.addEventListener("change", () => change(side, part, select.value));
    }
  }
  byId("swap").addEventListener("click", () => {
    const { left, right } = chosen;
    site.choose("left", right.kernel.id);
    site.choose("right", left.kernel.id);
  });

  function note(side) {
    const { kernel, given } = chosen[side];
    const said = [];
    if (!given) said.push("There is no kernel of exactly that name here; this one is near it.");
    if (!kernel.speed) said.push(data.never_run.includes(kernel.step) ? "Compiled, and never run." : "Not measured.");
    else if (!kernel.verified) said.push("Its output failed the check; speeds do not count.");
    if (kernel.other_text) said.push(`Measured at revision ${kernel.revision}, which generated other CUDA than what is shown.`);
    byId(side).querySelector("[data-note]").textContent = said.join(" ");
  }

  function name(kernel) {
    return `step ${kernel.step} ${kernel.variant}, ${kernel.product}, ${kernel.tiles}, ${data.gpus[kernel.gpu]}`;
  }

  // --- text --------------------------------------------------------------------------------------------------------
  const packs = new Map();
  async function texts(step) {
    if (!packs.has(step)) {
      packs.set(step, (async () => {
        const pack = JSON.parse(await load(`step${step}`));
        pack.lines = pack.lines.split("\n");
        return pack;
      })());
    }
    return packs.get(step);
  }

  function unroll(pack, number) {
    const found = [];
    const runs = pack.runs[number];
    for (let at = 0, place = 0; at < runs.length; at += 2) {
      const begin = place + runs[at];
      place = begin + runs[at + 1];
      for (let line = begin; line < place; line++) found.push(pack.lines[line]);
    }
    return found.join("\n");
  }

  async function textOf(kernel, choices) {
    if (kernel.text === undefined) return undefined;
    const pack = await texts(kernel.step);
    const places = pack.texts[kernel.text][choices.show];
    if (!places) return undefined;
    let text = unroll(pack, places[1]);
    if (choices.preamble === "true" && unroll(pack, places[0])) text = `${unroll(pack, places[0])}${text}`;
    if (choices.plain === "true") {
      for (const pattern of data.numbered[choices.show] || []) text = text.replace(new RegExp(pattern, "g"), "$1");
    }
    return text.replace(/\n*$/, "\n");
  }

  // --- difference --------------------------------------------------------------------------------------------------
  const cut = (text) => text.match(/[^\n]*\n|[^\n]+$/g) || [];

  // Lines that only one side has, and those of both; undefined where that takes too long. Two ask for the same.
  let aligned = {};
  function align(a, b) {
    if (aligned.a !== a || aligned.b !== b) aligned = { a, b, parts: codemirror.diffArrays(cut(a), cut(b), { timeout: SLOW_MS }) };
    return aligned.parts;
  }

  // Whole lines first, by jsdiff; then, in lines that changed, what changed, as CodeMirror finds it.
  function changes(a, b) {
    const parts = align(a, b);
    if (!parts) return codemirror.diff(a, b, { scanLimit: 500, timeout: SLOW_MS });
    const found = [];
    let [atA, atB] = [0, 0];
    for (let i = 0; i < parts.length;) {
      if (!parts[i].added && !parts[i].removed) {
        const same = parts[i++].value.reduce((sum, line) => sum + line.length, 0);
        atA += same;
        atB += same;
        continue;
      }
      let [old, fresh] = ["", ""];
      for (; i < parts.length && (parts[i].added || parts[i].removed); i++) {
        if (parts[i].removed) old += parts[i].value.join("");
        else fresh += parts[i].value.join("");
      }
      const fine = old && fresh && old.length + fresh.length < LARGE;
      const inside = fine ? codemirror.diff(old, fresh, { scanLimit: 500, timeout: SLOW_MS }) : [new codemirror.Change(0, old.length, 0, fresh.length)];
      for (const own of inside) found.push(new codemirror.Change(atA + own.fromA, atA + own.toA, atB + own.fromB, atB + own.toB));
      atA += old.length;
      atB += fresh.length;
    }
    return found;
  }

  function counted(a, b) {
    const parts = align(a, b);
    if (!parts) return "The texts differ almost everywhere";
    const sum = (kind) => parts.filter(kind).reduce((total, part) => total + part.value.length, 0);
    const lines = (count) => `${count.toLocaleString("en")} line${count === 1 ? "" : "s"}`;
    return `${lines(sum((part) => part.removed))} only left, ${lines(sum((part) => part.added))} only right, ${lines(sum((part) => !part.added && !part.removed))} in both`;
  }

  function extensions(choices, title) {
    const { EditorView, EditorState, HighlightStyle, StreamLanguage, lineNumbers, keymap, searchKeymap, search, syntaxHighlighting, tags } = codemirror;
    const colours = HighlightStyle.define([
      { tag: tags.comment, color: "light-dark(#5a636b, #98a2ab)" },
      { tag: [tags.keyword, tags.typeName, tags.standard(tags.typeName)], color: "light-dark(#7a2a8a, #d69be6)" },
      { tag: tags.string, color: "light-dark(#00694a, #6fcfa6)" },
      { tag: [tags.number, tags.atom], color: "light-dark(#9a4600, #efab74)" },
      { tag: [tags.definition(tags.variableName), tags.meta], color: "light-dark(#005a9c, #7cc0f7)" },
    ]);
    const languages = { schedule: codemirror.python, tir: codemirror.python, lowered: codemirror.python, cuda: codemirror.cpp, ptx: codemirror.gas, sass: codemirror.gas };
    return [
      lineNumbers(),
      EditorState.readOnly.of(true),
      EditorView.editable.of(false),
      EditorView.contentAttributes.of({ "aria-label": title, "aria-readonly": "true", tabindex: "0" }),
      StreamLanguage.define(languages[choices.show]),
      syntaxHighlighting(colours),
      search(),
      keymap.of(searchKeymap),
      choices.wrap === "true" ? EditorView.lineWrapping : [],
    ];
  }

  const narrow = matchMedia("(max-width: 50rem)");
  let shown = null; // the view that buttons move in
  let turn = 0;
  const place = byId("difference");

  // The kernel of a side's variant that every form is kept of.
  function usual(side) {
    const { step, variant } = chosen[side].kernel;
    return `${step}:${variant}`;
  }

  function missing(side, choices) {
    const { kernel } = chosen[side];
    const form = data.forms[choices.show];
    if (kernel.text === undefined) {
      return `${SIDES[side]}: texts are made at ${data.sizes.map((size) => `${size}³`).join(" and ")}, and where hardware counters or time stamps were taken; of others by ladder show ${kernel.step}:${kernel.variant} --shape ${kernel.id.split("~")[1]} --show ${choices.show}`;
    }
    return `${SIDES[side]}: ${form} needs a CUDA compiler, and was not recorded for this kernel: it is for default tiles at 1024³, without TF32 and debugging; ladder show ${kernel.step}:${kernel.variant} --shape ${kernel.id.split("~")[1]} --tile ${kernel.tile} --stages ${kernel.stages} --show ${choices.show}`;
  }

  async function compare(choices) {
    const own = ++turn;
    await (viewer ??= loadViewer());
    const [a, b] = await Promise.all(["left", "right"].map((side) => textOf(chosen[side].kernel, choices)));
    if (own !== turn) return;
    shown?.destroy();
    shown = null;
    place.replaceChildren();
    const lacking = [a === undefined && "left", b === undefined && "right"].filter(Boolean);
    for (const control of ["previous", "next"]) byId(control).disabled = Boolean(lacking.length) || a === b;
    if (lacking.length) {
      for (const side of lacking) {
        const said = document.createElement("p");
        said.className = "absent";
        said.textContent = missing(side, choices);
        place.append(said);
      }
      const link = element("a", "Both at a size and with tiles for which it is here");
      link.href = `compare.html#left=${usual("left")}&right=${usual("right")}&show=${choices.show}`;
      const line = element("p", "", { class: "absent" });
      line.append(link);
      place.append(line);
      byId("differences").textContent = "Nothing to compare.";
      place.dataset.drawn = String(own);
      return;
    }
    byId("differences").textContent = a === b ? `The same on both sides, character for character: ${data.forms[choices.show]} of ${cut(a).length} lines.` : `${counted(a, b)}.`;
    const collapse = choices.equal === "true" || cut(a).length + cut(b).length <= LONG ? undefined : { margin: 3, minSize: 6 };
    const titles = Object.fromEntries(Object.keys(SIDES).map((side) => [side, `${SIDES[side]}: ${name(chosen[side].kernel)}`]));
    const diffConfig = { override: changes };
    const names = document.createElement("div");
    names.className = "names";
    if (narrow.matches) {
      const text = document.createElement("span");
      text.textContent = "Left's lines, then right's in their place";
      names.append(text);
      place.append(names);
      const unified = codemirror.unifiedMergeView({ original: a, mergeControls: false, collapseUnchanged: collapse, diffConfig, syntaxHighlightDeletionsMaxLength: 0 });
      shown = new codemirror.EditorView({ doc: b, parent: place, extensions: [extensions(choices, titles.right), unified] });
    } else {
      for (const side of Object.keys(SIDES)) {
        const text = document.createElement("span");
        text.textContent = titles[side];
        names.append(text);
      }
      place.append(names);
      shown = new codemirror.MergeView({
        a: { doc: a, extensions: extensions(choices, titles.left) },
        b: { doc: b, extensions: extensions(choices, titles.right) },
        parent: place, collapseUnchanged: collapse, diffConfig,
      });
    }
    place.dataset.drawn = String(own);
  }

  function go(command) {
    if (!shown) return;
    const view = shown.b || shown;
    command({ state: view.state, dispatch: (transaction) => view.dispatch(transaction) });
  }
  byId("next").addEventListener("click", () => go(codemirror.goToNextChunk));
  byId("previous").addEventListener("click", () => go(codemirror.goToPreviousChunk));

  // --- figures -----------------------------------------------------------------------------------------------------
  const write = (number, digits) => number.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  function cell(own, digits) {
    if (own === undefined || own === null || own === "") return NONE;
    return typeof own === "number" ? write(own, digits) : own;
  }

  function against(left, right) {
    if (left === right) return "=";
    if (!(left > 0) || right === undefined) return "";
    const percent = 100 * (right / left - 1);
    return `${percent > 0 ? "+" : "−"}${write(Math.abs(percent), Math.abs(percent) < 10 ? 1 : 0)} %`;
  }

  function element(tag, text, attributes = {}) {
    const made = document.createElement(tag);
    made.textContent = text;
    for (const [key, own] of Object.entries(attributes)) made.setAttribute(key, own);
    return made;
  }

  function table(group, rows, below) {
    const spot = document.querySelector(`[data-table="${group}"]`);
    if (!rows.length) {
      spot.replaceChildren(...below.map((text) => element("p", text, { class: "note" })));
      return;
    }
    const made = element("table", "", { class: "pair" });
    const head = made.createTHead().insertRow();
    head.insertCell();
    for (const text of ["Left", "Right", "Right to left"]) head.append(element("th", text, { scope: "col", class: "num" }));
    const body = made.createTBody();
    for (const { heading, unit, digits, compared, left, right, more } of rows) {
      const row = body.insertRow();
      const first = element("th", heading, { scope: "row" });
      if (unit) first.append(" ", element("span", unit, { class: "unit" }));
      row.append(first);
      for (const [side, own] of [["left", left], ["right", right]]) {
        const made = element("td", cell(own, digits), { class: "num" });
        if (more?.[side]) made.append(" ", element("span", more[side], { class: "unit more" }));
        row.append(made);
      }
      row.append(element("td", compared ? against(left, right) : "", { class: "num" }));
    }
    const scroll = element("div", "", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${group} of both kernels` });
    scroll.append(made);
    spot.replaceChildren(scroll, ...below.map((text) => element("p", text, { class: "note" })));
  }

  function rowsOf(group) {
    const [left, right] = ["left", "right"].map((side) => chosen[side].kernel[group] || {});
    return Object.entries(data.fields[group])
      .filter(([field]) => left[field] !== undefined || right[field] !== undefined)
      .map(([field, [heading, unit, digits, compared]]) => ({ field, heading, unit, digits, compared, left: left[field], right: right[field] }));
  }

  function figures() {
    const [left, right] = ["left", "right"].map((side) => chosen[side].kernel);
    const measured = rowsOf("speed");
    for (const row of measured) {
      if (row.field !== "ratio") continue;
      const interval = (own) => (own.speed ? `${write(own.speed.low, 3)} to ${write(own.speed.high, 3)}` : "");
      row.more = { left: interval(left), right: interval(right) };
    }
    const commands = ["left", "right"].map((side) => `${SIDES[side]} ${chosen[side].kernel.speed ? "measured again" : "measured"} by: ${chosen[side].kernel.command}`);
    table("speed", measured, commands);
    table("resources", rowsOf("resources"), []);
    table("loop", rowsOf("loop"), ["Counted in the CUDA text; in all, where TVM has written the k loop out."]);
    const names = [...new Set([left, right].flatMap((kernel) => Object.keys(kernel.counters || {})))];
    const of = (kernel, field) => kernel.counters?.[field];
    const rows = names.map((field) => ({ heading: field, unit: "", digits: Math.max(of(left, field) ?? 0, of(right, field) ?? 0) >= 1000 ? 0 : 2, compared: true, left: of(left, field), right: of(right, field) }));
    const uncounted = ["left", "right"].filter((side) => !chosen[side].kernel.counters);
    table("counters", rows, [
      ...(names.length ? ["One launch under Nsight Compute."] : []),
      ...uncounted.map((side) => `${SIDES[side]}: not counted; on a GPU, ladder counters --step ${chosen[side].kernel.step} --variant ${chosen[side].kernel.variant} --shape ${chosen[side].kernel.id.split("~")[1]}`),
    ]);
    verdict(left, right);
  }

  function verdict(left, right) {
    const spot = byId("verdict");
    const known = [left, right].map((kernel) => kernel.speed && kernel.verified);
    if (!known[0] && !known[1]) { spot.textContent = "Neither was measured: code, and what follows from it."; return; }
    const ratio = (kernel) => element("strong", `${write(kernel.speed.ratio, 2)} of cuBLAS`);
    spot.replaceChildren();
    if (known[0]) spot.append("Left reaches ", ratio(left));
    if (known[0] && known[1]) spot.append(", right ");
    else if (known[1]) spot.append("Right reaches ");
    if (known[1]) spot.append(ratio(right));
    const alike = left.product === right.product && left.gpu === right.gpu;
    const apart = known[0] && known[1] && (left.speed.high < right.speed.low || right.speed.high < left.speed.low);
    if (alike && apart) spot.append(": by these ratios right is ", element("strong", `${write(right.speed.ratio / left.speed.ratio, 2)} times`), " as fast.");
    else if (alike && known[0] && known[1]) spot.append(": their 95 % intervals overlap, neither is shown to be faster.");
    else spot.append(known[0] && known[1] ? ", each on its own product and GPU." : "; the other was not measured.");
  }

  // --- charts ------------------------------------------------------------------------------------------------------
  function feed(figure, values, alt, said, more) {
    figure.hidden = !values.length;
    figure.querySelector(".vega").setAttribute("aria-label", alt);
    if (said !== undefined) figure.querySelector(".note").textContent = said;
    if (values.length) site.feed(figure, values, more);
  }

  // The sizes of a kernel as its step makes it go together, whatever tile that is; of any other its own tile and stages.
  function line(kernel) {
    const same = (other) => other.step === kernel.step && other.variant === kernel.variant && other.gpu === kernel.gpu && other.size &&
      other.product.replace(/^\S+/, "") === kernel.product.replace(/^\S+/, "") && other.speed && other.verified &&
      (kernel.default ? other.default : other.tiles === kernel.tiles);
    return data.kernels.filter(same).sort((a, b) => a.size - b.size);
  }

  function speeds() {
    const values = [];
    for (const side of Object.keys(SIDES)) {
      for (const { size, speed, tiles } of line(chosen[side].kernel)) values.push({ side: SIDES[side], size, ratio: speed.ratio, low: speed.low, high: speed.high, tile: tiles });
    }
    const told = Object.values(SIDES).map((side) => `${side}: ${values.filter((row) => row.side === side).map((row) => `${write(row.ratio, 2)} at ${row.size}`).join(", ") || "not measured"}`);
    const tiles = Object.keys(SIDES).map((side) => `${SIDES[side]}: ${chosen[side].kernel.default ? "the default tile of each size" : chosen[side].kernel.tiles}`);
    feed(byId("speeds"), values, `Ratios to cuBLAS. ${told.join(". ")}.`, `${tiles.join("; ")}.`);
  }

  async function lives() {
    const own = turn;
    const values = [];
    for (const side of Object.keys(SIDES)) {
      const { kernel } = chosen[side];
      if (!kernel.timeline) continue;
      const pack = await texts(kernel.step);
      for (const [row, kind, number, from, to] of pack.timelines[kernel.id]) values.push({ row: `${narrow.matches ? SIDES[side][0] : `${SIDES[side]}:`} ${row}`, kind, k: number, from, to });
    }
    if (own !== turn) return;
    const lacking = Object.keys(SIDES).filter((side) => !chosen[side].kernel.timeline);
    const said = document.querySelector("#timelines [data-missing]");
    said.textContent = lacking.map((side) => `${SIDES[side]}: no time stamps were taken.`).join(" ") + (lacking.length ? " Explicit kernels leave some (steps 11 to 13): ladder timeline --step 11,12 --size 4096." : "");
    document.querySelector("#timelines [data-window]").hidden = !values.length;
    feed(byId("lives"), values, "Rows of stages and roles, a bar for each load, multiplication and wait; the tables above have their sums.",
      undefined, { height: 24 * new Set(values.map((bar) => bar.row)).size });
  }

  // --- all of it ---------------------------------------------------------------------------------------------------
  let last = {};
  function update(choices) {
    const of = (names) => names.map((key) => choices[key]).join(" ");
    const now = { kernels: of(["left", "right"]), text: of(["left", "right", "show", "plain", "preamble", "equal", "wrap"]) };
    if (now.kernels !== last.kernels) {
      for (const side of Object.keys(SIDES)) {
        chosen[side] = find(choices[side]);
        fill(side, chosen[side].kernel);
        note(side);
      }
      figures();
      speeds();
    }
    const plain = document.querySelector('[data-choice="plain"]');
    plain.disabled = !(choices.show in data.numbered);
    if (now.text !== last.text) compare(choices);
    if (now.kernels !== last.kernels) lives();
    document.querySelector("#timelines output").textContent = `${choices.begin} to ${choices.end} µs`;
    last = now;
  }
  site.onChoice(update);
  narrow.addEventListener("change", () => { compare(site.choices); lives(); });
})();
