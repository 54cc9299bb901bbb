"use strict";
(() => {
  const FIELDS = 7, CAUSE = 1000000, COLOURS = 8, EVERY_MS = 1000, LATE_MS = 8000, HISTORY = 180;
  const $ = (id) => document.getElementById(id);
  const canvas = $("canvas"), tip = $("tip"), history = [];
  let data = null, seen = 0, windowS = 10, paused = false, colours = {}, place = null;

  // ---- asking ----
  async function ask() {
    const giveUp = new AbortController(), timer = setTimeout(() => giveUp.abort(), LATE_MS);
    try {
      const answer = await fetch(`dashboard/data?window_s=${windowS}`, { signal: giveUp.signal, cache: "no-store" });
      if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
      data = await answer.json();
      seen = performance.now();
      remember();
      show();
    } catch (error) {
      trouble(`No news for ${seen ? Math.round((performance.now() - seen) / 1000) + " s" : "now"}: ${error.name === "AbortError" ? "the server does not answer" : error.message}. Trying again.`);
      $("state").className = "state lost";
      $("state").textContent = "no contact";
    } finally {
      clearTimeout(timer);
    }
  }
  async function loop() {
    for (;;) {
      if (!paused && !document.hidden) await ask();
      await new Promise((go) => setTimeout(go, EVERY_MS));
    }
  }
  function remember() {
    const last = history[history.length - 1];
    if (last && data.now_s <= last.now_s) history.length = 0;  // the server began anew
    history.push({ now_s: data.now_s, ...data.totals });
    if (history.length > HISTORY) history.shift();
  }

  // ---- words ----
  function make(tag, text, name) {
    const node = document.createElement(tag);
    if (text !== undefined) node.textContent = text;
    if (name) node.className = name;
    return node;
  }
  function swatch(colour, text, help) {
    const span = make("span"), mark = make("i");
    mark.style.background = `var(--${colour})`;
    span.append(mark, document.createTextNode(text));
    if (help) span.title = help;
    return span;
  }
  function duration(s) {
    if (s === null || s === undefined) return "–";
    const size = Math.abs(s);
    return size >= 100 ? `${Math.round(s)} s` : size >= 1 ? `${s.toPrecision(3)} s` : size >= 1e-3 ? `${(s * 1e3).toPrecision(3)} ms` : `${(s * 1e6).toPrecision(3)} µs`;
  }
  function uptime(s) { return s < 120 ? `${s} s` : s < 7200 ? `${Math.round(s / 60)} min` : s < 172800 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86400)} days`; }
  function number(n) { return Math.round(n).toLocaleString("en"); }
  function short(n) { return n >= 1e6 ? `${(n / 1e6).toPrecision(3)}M` : n >= 1e4 ? `${(n / 1e3).toPrecision(3)}k` : n >= 100 || Number.isInteger(n) ? String(Math.round(n)) : n.toPrecision(2); }
  function bytes(n) { return n >= 2 ** 30 ? `${(n / 2 ** 30).toPrecision(3)} GiB` : `${Math.round(n / 2 ** 20)} MiB`; }
  function percent(x) { return `${(100 * x).toFixed(x < 0.0995 && x > 0 ? 1 : 0)} %`; }
  function fill(node, children) { node.replaceChildren(...children); }
  function trouble(text) { $("trouble").hidden = !text; $("trouble").textContent = text; }

  // ---- showing ----
  function show() {
    const state = data.state;
    $("state").className = `state ${state.name}`;
    $("state").textContent = state.name;
    trouble(state.reason || (data.reachable ? "" : "The ranks do not answer; what is shown is what was last known."));
    $("title").textContent = data.model;
    document.title = `${data.model} · pipelined`;
    $("meta").textContent = [`pipelined ${data.version}`, `${data.ranks.length} rank${data.ranks.length === 1 ? "" : "s"}`, `up ${uptime(data.up_s)}`,
      state.restarts ? `begun anew ${state.restarts} times; last loss ${state.latest_loss}` : ""].filter(Boolean).join("  ·  ");
    facts();
    drawTimeline();
    shares();
    latency();
    pages();
    drawRates();
    requests();
  }
  function rate(key, seconds) {
    const last = history[history.length - 1];
    const first = history.find((point) => last.now_s - point.now_s <= seconds) || last;
    return last.now_s > first.now_s ? (last[key] - first[key]) / (last.now_s - first.now_s) : 0;
  }
  function facts() {
    const busy = data.timeline.ranks.reduce((sum, rank) => sum + (rank.spent_s.busy || 0), 0);
    const all = (data.timeline.to_s - data.timeline.from_s) * data.ranks.length;
    const rows = [["Running", number(data.sequences.running)], ["Waiting", number(data.sequences.waiting)],
      ["Tokens out / s", short(rate("generation_tokens", 10))], ["Prompt tokens / s", short(rate("prompt_tokens", 10))],
      ["Stages busy", all ? percent(busy / all) : "–"],
      ["Cache hits", data.totals.prompt_tokens ? percent(data.totals.cached_tokens / data.totals.prompt_tokens) : "–"], ["Requests", number(data.totals.requests)]];
    fill($("facts"), rows.map(([name, value]) => { const box = make("div"); box.append(make("dt", name), make("dd", value)); return box; }));
  }
  function shares() {
    const line = data.timeline, wall = line.to_s - line.from_s || 1, table = make("table"), head = make("thead"), top = make("tr"), body = make("tbody"), used = new Set();
    for (const [text, name] of [["Rank", ""], ["Stage", "wide"], ["Share of the time", ""], ["Busy", "num"], ["Mostly idle for", "wide"], ["Memory", "num wide"]]) top.append(make("th", text, name));
    head.append(top);
    data.ranks.forEach((rank, index) => {
      const spent = line.ranks[index].spent_s, row = make("tr"), share = make("td", undefined, "share"), stack = make("div", undefined, "stack");
      for (const [key, name] of [["busy", "busy"], ...line.causes]) {
        if (!spent[key]) continue;
        if (key !== "busy") used.add(key);
        const part = make("span");
        part.style.width = `${(100 * spent[key]) / wall}%`;
        part.style.background = `var(--${key})`;
        part.title = `${name}: ${percent(spent[key] / wall)}`;
        stack.append(part);
      }
      share.append(stack);
      const worst = line.causes.filter((cause) => spent[cause[0]]).sort((a, b) => spent[b[0]] - spent[a[0]])[0];
      row.append(make("td", String(rank.rank)), make("td", rank.label, "name wide"), share, make("td", percent((spent.busy || 0) / wall), "num"),
        make("td", worst ? `${worst[1]} ${percent(spent[worst[0]] / wall)}` : "–", "wide"), make("td", bytes(rank.resident_bytes), "num wide"));
      body.append(row);
    });
    table.append(head, body);
    fill($("shares"), [table]);
    fill($("idle-legend"), [make("b", "Idle"), ...line.causes.filter((cause) => used.has(cause[0])).map(([key, name, help]) => swatch(key, name, help)), swatch("row", "not known yet", "A forward is told of once it is over")]);
  }
  function latency() {
    const rows = [["First token", data.latency.ttft_s], ["Between tokens", data.latency.itl_s], ["Whole request", data.latency.e2e_s]];
    fill($("latency"), rows.map(([name, values]) => { const row = make("tr"); row.append(make("td", name), ...[0, 1, 2].map((i) => make("td", values ? duration(values[i]) : "–", "num"))); return row; }));
  }
  function pages() {
    const { pages: all, available_pages: available, cached_pages: cached } = data.pages, used = all - available;
    const spare = Math.min(available, cached);
    const parts = [["w0", "held by sequences", used], ["w2", "cached, can be taken", spare], ["row", "free", all - used - spare]];
    fill($("pages-bar"), parts.map(([colour, name, count]) => { const part = make("span"); part.style.width = `${all ? (100 * count) / all : 0}%`; part.style.background = `var(--${colour})`; part.title = `${name}: ${number(count)}`; return part; }));
    fill($("pages-legend"), parts.map(([colour, name, count]) => swatch(colour, `${name} ${number(count)} (${percent(all ? count / all : 0)})`)));
  }
  function requests() {
    const live = data.requests, table = make("table"), head = make("thead"), top = make("tr"), body = make("tbody");
    for (const [text, name] of [["Request", ""], ["Prefill, then output", ""], ["Prompt", "num wide"], ["Tokens out", "num"], ["First token", "num wide"], ["Age", "num"]]) top.append(make("th", text, name));
    head.append(top);
    for (const one of live.shown) {
      const row = make("tr"), cell = make("td", undefined, "wait"), bar = make("div", undefined, `progress ${one.phase}`), outer = make("div"), inner = make("i");
      const done = one.phase === "decode" ? 1 : one.prefill_total ? one.prefill_done / one.prefill_total : 0;
      inner.style.width = `${100 * done}%`;
      outer.append(inner);
      outer.setAttribute("role", "progressbar");
      outer.setAttribute("aria-valuenow", String(Math.round(100 * done)));
      bar.append(outer, make("span", one.phase === "waiting" ? "waits" : one.phase === "decode" ? "answers" : `${short(one.prefill_done)} of ${short(one.prefill_total)}`));
      cell.append(bar);
      row.append(make("td", one.id, "id"), cell, make("td", one.cached_tokens ? `${number(one.prompt_tokens)} (${number(one.cached_tokens)} cached)` : number(one.prompt_tokens), "num wide"),
        make("td", number(one.tokens), "num"), make("td", duration(one.ttft_s), "num wide"), make("td", duration(one.age_s), "num"));
      body.append(row);
    }
    table.append(head, body);
    $("requests-title").textContent = live.live ? `Requests: ${number(live.live)}` : "Requests";
    fill($("requests"), live.live ? [table, ...(live.live > live.shown.length ? [make("p", `and ${number(live.live - live.shown.length)} more`, "muted")] : [])] : [make("p", "None at the moment.", "muted")]);
    fill($("finished"), live.finished.length ? [finished(live.finished)] : [make("p", "None yet.", "muted")]);
  }
  function finished(ones) {
    const table = make("table"), head = make("thead"), top = make("tr"), body = make("tbody");
    for (const [text, name] of [["Request", ""], ["Ended by", ""], ["Prompt", "num wide"], ["Tokens out", "num"], ["First token", "num"], ["Took", "num"]]) top.append(make("th", text, name));
    head.append(top);
    for (const one of ones) {
      const row = make("tr");
      row.append(make("td", one.id, "id"), make("td", one.reason), make("td", one.cached_tokens ? `${number(one.prompt_tokens)} (${number(one.cached_tokens)} cached)` : number(one.prompt_tokens), "num wide"),
        make("td", number(one.tokens), "num"), make("td", duration(one.ttft_s), "num"), make("td", duration(one.e2e_s), "num"));
      body.append(row);
    }
    table.append(head, body);
    return table;
  }

  // ---- pictures ----
  function readColours() {
    const style = getComputedStyle(document.documentElement);
    const names = ["ink", "muted", "line", "row", "panel", "busy", "fill", "drain", "input", "link", "scheduler", "window", "host", "no_work"];
    for (let i = 0; i < COLOURS; i++) names.push(`w${i}`);
    colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  }
  function paper(target, height) {
    const scale = window.devicePixelRatio || 1, width = target.clientWidth;
    target.style.height = `${height}px`;
    if (target.width !== Math.round(width * scale) || target.height !== Math.round(height * scale)) { target.width = Math.round(width * scale); target.height = Math.round(height * scale); }
    const context = target.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    return [context, width];
  }
  function workColour(group) {  // by the request's own number, so that it keeps its colour from one look to the next
    const name = data.timeline.groups[group];
    const own = name === undefined ? group : parseInt(name, 10);
    return colours[`w${(Number.isNaN(own) ? group : own) % COLOURS}`];
  }
  function drawTimeline() {
    const line = data.timeline, ranks = line.ranks.length, row = Math.max(18, Math.min(44, 300 / ranks)), gap = row > 24 ? 6 : 3, top = 22, left = ranks > 1 || row ? 34 : 0;
    const [context, width] = paper(canvas, top + ranks * (row + gap));
    const to = Math.max(line.to_s, Math.min(data.now_s, line.to_s + windowS / 2)), from = to - windowS, x = (s) => left + ((s - from) / windowS) * (width - left);
    place = { from, to, left, width, top, row, gap, rows: [] };
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    const step = windowS <= 3 ? 0.5 : windowS <= 10 ? 2 : 5;
    for (let back = 0; back <= windowS; back += step) {
      const at = x(to - back);
      context.fillStyle = colours.line;
      context.fillRect(at, top - 4, 1, ranks * (row + gap));
      context.fillStyle = colours.muted;
      context.textAlign = back ? "center" : "right";
      if (at > left + 12) context.fillText(back ? `−${back} s` : "now", back ? at : width, 9);
    }
    line.ranks.forEach((rank, index) => {
      const y = top + index * (row + gap), middle = y + row / 2, thin = Math.max(3, row * 0.22), pieces = [];
      context.fillStyle = colours.row;
      context.fillRect(left, y, width - left, row);
      let at = line.from_s * 1e9;
      for (let i = 0; i < rank.items.length; i += FIELDS) {
        const [length, code, number_, detail, label, count, busy] = rank.items.slice(i, i + FIELDS), a = x(at / 1e9), b = x((at + length) / 1e9);
        pieces.push([at / 1e9, (at + length) / 1e9, code, number_, detail, count, busy]);
        at += length;
        if (b < left) continue;
        block(context, code, Math.max(left, a), Math.max(0.5, b - Math.max(left, a)), y, row, middle, thin, busy / 1000);
        if (label && b - a > 26 && row >= 26) write(context, line.labels[label].split("\n")[0], a, b, middle);
      }
      place.rows.push(pieces);
      context.fillStyle = colours.muted;
      context.textAlign = "left";
      context.fillText(String(data.ranks[index].rank), 4, middle);
    });
    point();
  }
  function block(context, code, left, width, top, height, middle, thin, busy) {
    if (code >= CAUSE) {
      context.fillStyle = colours[data.timeline.causes[code - CAUSE][0]];
      context.fillRect(left, middle - thin / 2, width, thin);
      return;
    }
    const tall = Math.max(thin, height * Math.min(1, busy)), from = top + (height - tall) / 2, space = width > 4 ? 1 : 0;
    if (code >= 0) { context.fillStyle = workColour(code); context.fillRect(left, from, width - space, tall); return; }
    const mix = data.timeline.mixes[-1 - code], total = mix.reduce((sum, part) => sum + part[1], 0);
    let at = from;
    for (const [group, share] of mix) {
      context.fillStyle = workColour(group);
      context.fillRect(left, at, width - space, (tall * share) / total + 0.3);
      at += (tall * share) / total;
    }
  }
  function write(context, text, left, right, middle) {
    context.font = "600 11px system-ui, sans-serif";
    context.textAlign = "center";
    if (context.measureText(text).width <= right - left - 6) {
      context.shadowColor = "rgb(0 0 0 / 50%)";
      context.shadowBlur = 2;
      context.fillStyle = "#fff";
      context.fillText(text, (left + right) / 2, middle + 0.5);
      context.shadowBlur = 0;
    }
    context.font = "11px system-ui, sans-serif";
  }
  let pointer = null;
  function point() {
    tip.hidden = true;
    if (!pointer || !place || !data) return;
    const row = Math.floor((pointer.y - place.top) / (place.row + place.gap)), s = place.from + ((pointer.x - place.left) / (place.width - place.left)) * windowS;
    const piece = (place.rows[row] || []).find((each) => each[0] <= s && s < each[1]);
    if (!piece || pointer.x < place.left) return;
    const [from, to, code, number_, detail, count, busy] = piece, cause = code >= CAUSE ? data.timeline.causes[code - CAUSE] : null;
    const title = cause ? `Idle: ${cause[1]}` : count > 1 ? `${count} micro-batches, busy ${percent(busy / 1000)}` : `Step ${number_}`;
    fill(tip, [make("strong", title), make("div", cause ? cause[2] : data.timeline.details[detail] || ""), make("div", `rank ${data.ranks[row].rank}, ${duration(to - from)}`)]);
    tip.hidden = false;
    tip.style.transform = `translate(${Math.max(0, Math.min(pointer.x + 12, place.width - tip.offsetWidth - 4))}px, ${pointer.y + 14}px)`;
  }
  function drawRates() {
    const [context, width] = paper($("rates"), 110), points = [];
    for (let i = 1; i < history.length; i++) {
      const span = history[i].now_s - history[i - 1].now_s || 1;
      points.push([history[i].now_s, (history[i].generation_tokens - history[i - 1].generation_tokens) / span, (history[i].prompt_tokens - history[i - 1].prompt_tokens) / span]);
    }
    const most = Math.max(1, ...points.map((p) => Math.max(p[1], p[2]))), end = data.now_s, whole = HISTORY * (EVERY_MS / 1000);
    const x = (s) => width - ((end - s) / whole) * width, y = (v) => 104 - (v / most) * 88;
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = colours.line;
    context.fillRect(0, 104, width, 1);
    context.fillRect(0, y(most), width, 1);
    context.fillStyle = colours.muted;
    context.fillText(`${short(most)} / s`, 2, 10);
    for (const [index, colour] of [[2, "w0"], [1, "w2"]]) {
      context.strokeStyle = colours[colour];
      context.lineWidth = 1.8;
      context.beginPath();
      points.forEach((p, i) => (i ? context.lineTo(x(p[0]), y(p[index])) : context.moveTo(x(p[0]), y(p[index]))));
      context.stroke();
    }
    fill($("rates-legend"), [swatch("w2", `out ${short(rate("generation_tokens", 10))}`), swatch("w0", `prompt ${short(rate("prompt_tokens", 10))}`)]);
  }

  // ---- hands ----
  for (const button of document.querySelectorAll("[data-window]"))
    button.addEventListener("click", () => {
      windowS = Number(button.dataset.window);
      for (const each of document.querySelectorAll("[data-window]")) each.setAttribute("aria-pressed", String(each === button));
      if (data) ask();
    });
  $("pause").addEventListener("click", () => { paused = !paused; $("pause").setAttribute("aria-pressed", String(paused)); $("pause").textContent = paused ? "Go on" : "Pause"; });
  for (const name of ["pointermove", "pointerdown"])
    canvas.addEventListener(name, (event) => { const box = canvas.getBoundingClientRect(); pointer = { x: event.clientX - box.left, y: event.clientY - box.top }; point(); });
  canvas.addEventListener("pointerleave", () => { pointer = null; point(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); if (data) show(); });
  addEventListener("resize", () => { if (data) show(); });
  readColours();
  loop();
})();
