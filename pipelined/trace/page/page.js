"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const FIELDS = 7, CAUSE = 1000000, COLOURS = 8;
  const canvas = document.getElementById("canvas"), context = canvas.getContext("2d");
  const tip = document.getElementById("tip");
  const wall = Math.max(data.wall_s / data.unit_s, 1e-9);  // in units
  const rows = data.ranks.map(unpack);
  const view = { from: 0, to: wall };
  let hover = null, colours = {}, size = { width: 0, height: 0, left: 0, row: 0, gap: 0, top: 26 };

  function unpack(rank) {
    const count = rank.items.length / FIELDS;
    const row = { ...rank, count, start: new Float64Array(count + 1), at: new Map() };
    for (let i = 0, time = 0; i < count; i++) {
      row.start[i] = time;
      time += rank.items[i * FIELDS];
      row.start[i + 1] = time;
      const step = rank.items[i * FIELDS + 2];
      if (step >= 0) row.at.has(step) ? row.at.get(step).push(i) : row.at.set(step, [i]);
    }
    return row;
  }
  function piece(row, i) {
    const o = i * FIELDS, v = row.items;
    return { from: row.start[i], to: row.start[i + 1], code: v[o + 1], step: v[o + 2], detail: data.details[v[o + 3]],
             label: data.labels[v[o + 4]], count: v[o + 5], busy: v[o + 6] / 1000 };
  }
  function find(row, time) {  // the piece that holds `time`
    let low = 0, high = row.count;
    while (low < high) { const middle = (low + high) >> 1; if (row.start[middle + 1] <= time) low = middle + 1; else high = middle; }
    return low;
  }

  // ---- text ----
  function duration(seconds) {
    const a = Math.abs(seconds);
    if (a === 0) return "0 s";
    if (a < 1e-6) return (seconds * 1e9).toPrecision(3) + " ns";
    if (a < 1e-3) return trim((seconds * 1e6).toPrecision(3)) + " µs";
    if (a < 1) return trim((seconds * 1e3).toPrecision(3)) + " ms";
    return (a < 100 ? seconds.toPrecision(3) : seconds.toFixed(0)) + " s";
  }
  function trim(text) { return String(Number(text)); }
  function percent(share) { return (100 * share).toFixed((share > 0 && share < 0.1) || (share > 0.99 && share < 1) ? 1 : 0) + " %"; }
  function make(tag, text, name) {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (name) element.className = name;
    return element;
  }
  function swatch(colour, text, title) {
    const span = make("span"), mark = make("i");
    mark.style.background = `var(--${colour})`;
    span.append(mark, document.createTextNode(text));
    if (title) span.title = title;
    return span;
  }
  function groupName(index) {
    const name = data.groups[index];
    return name === "" || name === undefined ? "other" : data.by === "request" ? "request " + name : name;
  }

  // ---- what does not move ----
  function fillPage() {
    document.getElementById("meta").textContent = data.meta.map(([k, v]) => `${k} ${v}`).join("  ·  ");
    const busy = data.ranks.reduce((sum, r) => sum + r.busy_s, 0), all = data.wall_s * data.ranks.length;
    const causes = {};
    for (const rank of data.ranks) for (const [c, s] of Object.entries(rank.causes)) causes[c] = (causes[c] || 0) + s;
    const main = Object.entries(causes).sort((a, b) => b[1] - a[1])[0];
    const facts = [["Wall time", duration(data.wall_s)], ["Ranks", String(data.ranks.length)], ["Steps", data.steps.toLocaleString("en")],
                   ["Busy", all ? percent(busy / all) : "–"]];
    if (main) facts.push(["Most idle time", `${causeOf(main[0])[1]}, ${percent(main[1] / all)}`]);
    for (const [name, value] of facts) {
      const box = make("div");
      box.append(make("dt", name), make("dd", value));
      document.getElementById("facts").append(box);
    }
    const work = document.getElementById("work-legend");
    work.append(make("b", "Work"));
    if (data.by === "micro-batch") {
      const span = make("span");
      for (let i = 0; i < COLOURS; i++) { const mark = make("i"); mark.style.background = `var(--w${i})`; span.append(mark); }
      span.append(document.createTextNode("one colour a micro-batch, in turn"));
      work.append(span);
    } else {
      data.groups.slice(0, 12).forEach((_, i) => work.append(swatch("w" + (i % COLOURS), groupName(i))));
      if (data.groups.length > 12) work.append(make("span", `and ${data.groups.length - 12} more, colours in turn`));
    }
    const idle = document.getElementById("idle-legend");
    idle.append(make("b", "Idle"));
    for (const [key, name, help] of data.causes) if (causes[key]) idle.append(swatch(key, name, help));
    if (!main) idle.append(make("span", "never"));
    if (data.path.length) idle.append(swatch("path", "critical path (paler: no forward)", "What the whole time consists of: shorten any of it, and all ends sooner"));
    const notes = [];
    if (data.merged_s) notes.push(`Pieces shorter than ${duration(data.merged_s)} are drawn together; the totals below are exact.`);
    if (data.dropped) notes.push(`${data.dropped.toLocaleString("en")} early spans had been dropped from the ranks' buffers.`);
    notes.push("Drag to move, scroll or pinch to zoom, double-click to zoom in. Point at a block for its details.");
    document.getElementById("note").textContent = notes.join(" ");
    document.getElementById("totals").append(totals());
  }
  function causeOf(key) { return data.causes.find((cause) => cause[0] === key); }
  function totals() {
    const table = make("table"), head = make("thead"), line = make("tr"), body = make("tbody");
    for (const [text, name] of [["Rank", ""], ["Stage", "wide"], ["Share of the time", ""], ["Busy", "num"], ["", "num wide"], ["Idle", "num wide"], ["Mostly", ""]])
      line.append(make("th", text, name));
    head.append(line);
    for (const rank of data.ranks) {
      const tr = make("tr"), share = make("td", undefined, "share"), stack = make("div", undefined, "stack");
      const parts = [["busy", "busy", rank.busy_s], ...data.causes.filter((c) => rank.causes[c[0]]).map((c) => [c[0], c[1], rank.causes[c[0]]])];
      for (const [colour, name, seconds] of parts) {
        const part = make("span");
        part.style.cssText = `width:${(100 * seconds) / (data.wall_s || 1)}%;background:var(--${colour})`;
        part.title = `${name}: ${duration(seconds)} (${percent(seconds / (data.wall_s || 1))})`;
        stack.append(part);
      }
      share.append(stack);
      const worst = Object.entries(rank.causes).sort((a, b) => b[1] - a[1])[0];
      tr.append(make("td", String(rank.rank)), make("td", rank.label, "name wide"), share,
                make("td", percent(rank.busy_s / (data.wall_s || 1)), "num"), make("td", duration(rank.busy_s), "num wide"),
                make("td", duration(data.wall_s - rank.busy_s), "num wide"),
                make("td", worst ? `${causeOf(worst[0])[1]} ${percent(worst[1] / (data.wall_s || 1))}` : "–"));
      body.append(tr);
    }
    table.append(head, body);
    return table;
  }

  // ---- the picture ----
  function readColours() {
    const style = getComputedStyle(document.documentElement);
    colours = {};
    const names = ["path", "panel", "ink", "muted", "line", "row", ...data.causes.map((c) => c[0])];
    for (let i = 0; i < COLOURS; i++) names.push("w" + i);
    for (const name of names) colours[name] = style.getPropertyValue("--" + name).trim();
  }
  function layout() {
    const width = document.getElementById("chart").clientWidth, ratio = window.devicePixelRatio || 1, count = Math.max(1, rows.length);
    const narrow = width < 560;
    size.row = Math.max(14, Math.min(narrow ? 38 : 52, Math.floor(620 / count)));
    size.gap = size.row > 24 ? 8 : 3;
    size.left = narrow ? 54 : 132;
    size.width = width;
    size.height = size.top + count * (size.row + size.gap) + 4;
    canvas.style.height = size.height + "px";
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(size.height * ratio);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    draw();
  }
  const scale = () => (size.width - size.left) / (view.to - view.from);
  const snap = (px) => { const ratio = window.devicePixelRatio || 1; return Math.round(px * ratio) / ratio; };
  const x = (time) => size.left + (time - view.from) * scale();
  const y = (index) => size.top + index * (size.row + size.gap);

  function draw() {
    context.clearRect(0, 0, size.width, size.height);
    axis();
    context.save();
    context.beginPath();
    context.rect(size.left, 0, size.width - size.left, size.height);
    context.clip();
    rows.forEach(drawRow);
    drawPath();
    if (hover && hover.piece.step >= 0) outline(hover.piece.step);
    context.restore();
    rows.forEach(drawName);
  }
  function axis() {
    const span = (view.to - view.from) * data.unit_s, wanted = Math.max(2, (size.width - size.left) / 110);
    let tick = 10 ** Math.floor(Math.log10(span / wanted));
    for (const factor of [1, 2, 5, 10]) if (span / (tick * factor) <= wanted) { tick *= factor; break; }
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    for (let n = Math.ceil((view.from * data.unit_s) / tick); n * tick <= view.to * data.unit_s * (1 + 1e-12); n++) {
      const at = x((n * tick) / data.unit_s), text = tickText(n * tick, tick);
      context.fillStyle = colours.line;
      context.fillRect(Math.round(at), size.top - 6, 1, size.height);
      context.fillStyle = colours.muted;
      const half = context.measureText(text).width / 2;
      context.textAlign = at - half < size.left ? "left" : at + half > size.width ? "right" : "center";
      context.fillText(text, Math.min(Math.max(at, size.left), size.width), 10);
    }
  }
  function tickText(seconds, tick) {
    const [factor, unit] = view.to * data.unit_s >= 1 ? [1, "s"] : view.to * data.unit_s >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
    const digits = Math.max(0, -Math.floor(Math.log10(tick * factor) + 1e-9));
    return (seconds * factor).toFixed(Math.min(digits, 9)) + " " + unit;
  }
  function drawRow(row, index) {
    const top = y(index), height = size.row, thin = Math.max(4, Math.round(height * 0.3)), middle = top + (height - thin) / 2;
    context.fillStyle = colours.row;
    context.fillRect(size.left, top, size.width - size.left, height);
    const k = scale();
    for (let i = find(row, view.from); i < row.count && row.start[i] < view.to; ) {
      const p = piece(row, i), left = snap(x(p.from));
      let right = snap(x(p.to)), next = i + 1;
      if ((p.to - p.from) * k < 0.7) {  // many pieces in one pixel: draw the share of it that is work
        const stop = p.from + 1 / k;
        let busy = 0, code = p.code, longest = 0;
        for (next = i; next < row.count && row.start[next] < stop && (next === i || (row.start[next + 1] - row.start[next]) * k < 0.7); next++) {
          const q = row.items[next * FIELDS + 1], length = row.start[next + 1] - row.start[next], part = (length * row.items[next * FIELDS + 6]) / 1000;
          busy += part;
          if (part + length * 1e-3 > longest) { longest = part + length * 1e-3; code = q; }
        }
        right = x(row.start[next]);
        block(code, left, right - left, top, height, middle, thin, Math.min(1, busy / Math.max(1e-9, row.start[next] - p.from)));
      } else {
        const space = p.code < CAUSE && right - left > 4 ? 1 : 0;
        block(p.code, left, right - left - space, top, height, middle, thin, p.busy);
        if (p.label && right - left > 20 && height >= 18) write(p.label, left, right, top, height);
      }
      i = next;
    }
  }
  function drawPath() {  // along the bottom edge of the row that everything waits for, and down or up to the next
    const path = data.path, thick = Math.max(2, Math.min(4, size.row / 9)), edge = (row) => y(row) + size.row;
    let low = 0, high = path.length / 4;
    while (low < high) { const middle = (low + high) >> 1; if (path[middle * 4 + 2] < view.from) low = middle + 1; else high = middle; }
    context.fillStyle = colours.path;
    for (let o = Math.max(0, low - 1) * 4; o < path.length && path[o + 1] <= view.to; o += 4) {
      const left = x(path[o + 1]), top = edge(path[o]) - thick / 2;
      context.globalAlpha = path[o + 3] ? 1 : 0.45;
      context.fillRect(left, top, Math.max(0.8, x(path[o + 2]) - left), thick);
      context.globalAlpha = 1;
      if (o && path[o - 4] !== path[o]) {
        const before = edge(path[o - 4]) - thick / 2;
        context.fillRect(left - 0.75, Math.min(top, before), 1.5, Math.abs(top - before) + thick);
      }
    }
  }
  function block(code, left, width, top, height, middle, thin, busy) {
    if (code >= CAUSE) {
      context.fillStyle = colours[data.causes[code - CAUSE][0]];
      context.fillRect(left, middle, Math.max(width, 0.5), thin);
      return;
    }
    const tall = Math.max(thin, height * (busy < 1 ? busy : 1)), from = top + (height - tall) / 2;
    if (code >= 0) {
      context.fillStyle = colours["w" + (code % COLOURS)];
      context.fillRect(left, from, Math.max(width, 0.5), tall);
      return;
    }
    const mix = data.mixes[-1 - code], total = mix.reduce((sum, part) => sum + part[1], 0);
    let at = from;
    for (const [group, share] of mix) {
      const part = (tall * share) / total;
      context.fillStyle = colours["w" + (group % COLOURS)];
      context.fillRect(left, at, Math.max(width, 0.5), part + 0.3);
      at += part;
    }
  }
  function write(label, left, right, top, height) {
    const lines = label.split("\n"), shown = height >= 36 ? lines : lines.slice(0, 1);
    const from = Math.max(left, size.left), to = Math.min(right, size.width);
    context.font = "600 11px system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "middle";
    let fits = true;
    shown.forEach((line, n) => {
      if (n) context.font = "10px system-ui, sans-serif";
      fits = fits && context.measureText(line).width <= to - from - 6;
      if (!fits) return;
      context.fillStyle = "#fff";
      context.shadowColor = "rgb(0 0 0 / 45%)";
      context.shadowBlur = 2;
      context.fillText(line, (from + to) / 2, top + height / 2 + (n - (shown.length - 1) / 2) * 13);
      context.shadowBlur = 0;
    });
  }
  function nearest(row, step, time) {
    let best = -1;
    for (const i of row.at.get(step) || []) if (best < 0 || Math.abs(row.start[i] - time) < Math.abs(row.start[best] - time)) best = i;
    return best;
  }
  function outline(step) {  // the same step on every rank, and its way from one to the next
    context.strokeStyle = colours.ink;
    context.lineWidth = 1.5;
    let before = null;
    rows.forEach((row, index) => {
      const i = nearest(row, step, before ? before.time : hover.piece.from);
      if (i < 0) return;
      const p = piece(row, i), left = x(p.from), right = x(p.to);
      context.strokeRect(left + 0.5, y(index) + 0.5, Math.max(1, right - left - 1), size.row - 1);
      if (before) { context.beginPath(); context.moveTo(before.right, before.bottom); context.lineTo(left, y(index)); context.stroke(); }
      before = { right, bottom: y(index) + size.row, time: p.to };
    });
  }
  function drawName(row, index) {
    const middle = y(index) + size.row / 2, busy = percent(row.busy_s / (data.wall_s || 1)), narrow = size.left < 100;
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.fillStyle = colours.ink;
    context.font = "600 12px system-ui, sans-serif";
    context.fillText((narrow ? "" : "rank ") + row.rank, 0, middle - (size.row >= 30 ? 8 : 0));
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = colours.muted;
    if (size.row < 30) { context.textAlign = "right"; context.fillText(busy, size.left - 8, middle); return; }
    context.fillText(clip(narrow ? busy : row.label, size.left - 14), 0, middle + 8);
    if (!narrow) { context.textAlign = "right"; context.fillText(busy, size.left - 10, middle - 8); }
  }
  function clip(text, width) {
    if (context.measureText(text).width <= width) return text;
    while (text && context.measureText(text + "…").width > width) text = text.slice(0, -1);
    return text + "…";
  }

  // ---- pointing, moving, zooming ----
  function point(event) {
    const box = canvas.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
    const index = Math.floor((py - size.top) / (size.row + size.gap)), row = rows[index];
    const time = view.from + (px - size.left) / scale();
    if (!row || px < size.left || time < 0 || time >= row.start[row.count]) return forget();
    hover = { row, piece: piece(row, find(row, time)) };
    tell(px, py);
    draw();
  }
  function forget() { tip.hidden = true; if (hover) { hover = null; draw(); } }
  function tell(px, py) {
    const { row, piece: p } = hover, lines = [];
    if (p.code >= CAUSE) {
      const [, name, help] = data.causes[p.code - CAUSE];
      lines.push(`Idle: ${name}`, help);
    } else if (p.count > 1 || p.busy < 1) lines.push(`${p.count.toLocaleString("en")} steps drawn together`, `${percent(p.busy)} busy`);
    else {
      lines.push(p.step >= 0 ? `Step ${p.step}` : "Forward");
      if (p.detail) lines.push(/^\d+$/.test(p.detail) ? p.detail + " rows" : p.detail);
    }
    lines.push(`rank ${row.rank}${row.label ? ", " + row.label : ""}`,
               `${duration((p.to - p.from) * data.unit_s)}, from ${duration(p.from * data.unit_s)} to ${duration(p.to * data.unit_s)}`);
    tip.replaceChildren(...lines.map((line, i) => make(i ? "div" : "strong", line)));
    tip.hidden = false;
    const width = tip.offsetWidth, height = tip.offsetHeight;
    tip.style.left = Math.max(0, Math.min(px + 14, size.width - width)) + "px";
    tip.style.top = (py + 18 + height > size.height + 60 ? py - height - 10 : py + 18) + "px";
  }
  function show(from, to) {
    const length = Math.min(wall, Math.max(to - from, wall / 1e6, 20));
    const start = Math.max(0, Math.min(from, wall - length));
    view.from = start;
    view.to = start + length;
    draw();
  }
  function zoom(factor, px) {
    const at = view.from + ((px === undefined ? (size.left + size.width) / 2 : Math.max(px, size.left)) - size.left) / scale();
    show(at - (at - view.from) / factor, at + (view.to - at) / factor);
  }
  const fingers = new Map();
  let pinch = null;
  canvas.addEventListener("pointerdown", (event) => { fingers.set(event.pointerId, event); canvas.setPointerCapture(event.pointerId); pinch = null; if (event.pointerType !== "mouse") point(event); });
  canvas.addEventListener("pointermove", (event) => {
    const before = fingers.get(event.pointerId);
    if (!before) return point(event);
    fingers.set(event.pointerId, event);
    if (fingers.size === 1) {
      const by = (event.clientX - before.clientX) / scale();
      if (by) { canvas.classList.add("dragging"); show(view.from - by, view.to - by); }
    } else if (fingers.size === 2) {
      const [a, b] = [...fingers.values()], apart = Math.max(10, Math.abs(a.clientX - b.clientX));
      if (pinch) zoom(apart / pinch, (a.clientX + b.clientX) / 2 - canvas.getBoundingClientRect().left);
      pinch = apart;
    }
  });
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, (event) => { fingers.delete(event.pointerId); pinch = null; canvas.classList.remove("dragging"); });
  canvas.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") forget(); });
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) { const by = (event.deltaX || event.deltaY) / scale(); show(view.from + by, view.to + by); }
    else zoom(Math.exp(-event.deltaY / 400), event.clientX - canvas.getBoundingClientRect().left);
  }, { passive: false });
  canvas.addEventListener("dblclick", (event) => zoom(3, event.clientX - canvas.getBoundingClientRect().left));
  canvas.addEventListener("keydown", (event) => {
    const by = (view.to - view.from) / 5;
    const does = { ArrowLeft: () => show(view.from - by, view.to - by), ArrowRight: () => show(view.from + by, view.to + by),
                   "+": () => zoom(1.5), "=": () => zoom(1.5), "-": () => zoom(1 / 1.5), 0: () => show(0, wall) }[event.key];
    if (does) { event.preventDefault(); does(); }
  });
  document.getElementById("in").onclick = () => zoom(2);
  document.getElementById("out").onclick = () => zoom(0.5);
  document.getElementById("fit").onclick = () => show(0, wall);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); draw(); });
  new ResizeObserver(layout).observe(document.getElementById("chart"));

  fillPage();
  readColours();
  layout();
})();
