"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const main = document.getElementById("main"), tip = document.getElementById("tip");
  const search = document.getElementById("search"), found = document.getElementById("found");
  const MIB = 1048576, figures = [], tables = [];
  const wanted = { text: "", layer: null, expert: null };

  // ---- small things

  const el = (name, props = {}, ...inside) => {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(props)) key in made ? (made[key] = value) : made.setAttribute(key, value);
    made.append(...inside);
    return made;
  };
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const fmt = (v, digits = 3) => {
    if (v === null || v === undefined || Number.isNaN(v)) return "–";
    if (typeof v !== "number") return String(v);
    if (Number.isInteger(v)) return v.toLocaleString("en");
    return Math.abs(v) >= 1e5 ? Math.round(v).toLocaleString("en") : String(Number(v.toPrecision(digits)));
  };
  const seconds = (s) => s === null || s === undefined ? "–" : s < 1e-3 ? `${fmt(s * 1e6)} µs` : s < 1 ? `${fmt(s * 1e3)} ms` : `${fmt(s)} s`;
  const percent = (v) => v === null || v === undefined || Number.isNaN(v) ? "–" : `${(100 * v).toFixed(1)} %`;
  const bytes = (b) => b >= 1024 * MIB ? `${fmt(b / MIB / 1024)} GiB` : b >= MIB ? `${fmt(b / MIB)} MiB` : `${fmt(b / 1024)} KiB`;
  const u32 = (text) => {
    const raw = atob(text), out = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i);
    const view = new DataView(out.buffer), numbers = new Uint32Array(raw.length / 4);
    for (let i = 0; i < numbers.length; i++) numbers[i] = view.getUint32(4 * i, true);
    return numbers;
  };
  const RAMP = [[68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141], [39, 173, 129], [92, 200, 99], [170, 220, 50], [253, 231, 37]];
  const ramp = (t) => {
    const at = Math.min(Math.max(t, 0), 1) * (RAMP.length - 1), i = Math.min(Math.floor(at), RAMP.length - 2), f = at - i;
    return RAMP[i].map((v, k) => Math.round(v + (RAMP[i + 1][k] - v) * f));
  };
  const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  const ticks = (low, high, count, whole) => {
    if (!(high > low)) return [low];
    let step = 10 ** Math.floor(Math.log10((high - low) / count));
    while ((high - low) / step > count) step *= (high - low) / step / 2 <= count ? 2 : (high - low) / step / 5 <= count ? 5 : 10;
    if (whole) step = Math.max(1, Math.round(step));
    const out = [];
    for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) out.push(Math.abs(v) < step * 1e-9 ? 0 : v);
    return out;
  };

  // ---- figures

  const figure = (parent, title, height, draw, { note = "", control = null, legend = [], label = "" } = {}) => {
    const canvas = el("canvas", { tabIndex: 0, role: "img" });
    canvas.setAttribute("aria-label", label || title);
    const caption = el("figcaption", {}, el("div", {}, el("h3", { textContent: title }), el("p", { className: "note", textContent: note })));
    if (control) caption.append(control);
    const box = el("figure", {}, caption, canvas);
    if (legend.length) box.append(el("div", { className: "legend" }, ...legend.map(([name, tone]) => {
      const swatch = el("i"); swatch.style.background = `var(${tone})`;
      return el("span", {}, swatch, name);
    })));
    parent.append(box);
    const item = { canvas, hover: null, draw: () => {
      const width = canvas.clientWidth || 900, ratio = window.devicePixelRatio || 1;
      const high = typeof height === "function" ? height() : height;
      canvas.style.height = `${high}px`; canvas.width = Math.round(width * ratio); canvas.height = Math.round(high * ratio);
      const ctx = canvas.getContext("2d"); ctx.scale(ratio, ratio);
      ctx.font = "12px system-ui, sans-serif";
      item.hover = draw(ctx, width, high) || null;
      canvas.dataset.drawn = "yes";
    } };
    canvas.addEventListener("mousemove", (event) => {
      const box = canvas.getBoundingClientRect();
      const text = item.hover && item.hover(event.clientX - box.left, event.clientY - box.top);
      tip.hidden = !text;
      if (text) {
        tip.textContent = text;
        tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
        tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
      }
    });
    canvas.addEventListener("mouseleave", () => { tip.hidden = true; });
    figures.push(item);
    return item;
  };

  /* Axes with labels and units; x and y are {min, max, label, ticks?, whole?, name?}. Gives the scales. */
  const axes = (ctx, w, h, x, y, right = 16) => {
    const m = { left: 62, right, top: 8, bottom: 40 }, pw = w - m.left - m.right, ph = h - m.top - m.bottom;
    const sx = (v) => m.left + (v - x.min) / (x.max - x.min || 1) * pw;
    const sy = (v) => m.top + ph - (v - y.min) / (y.max - y.min || 1) * ph;
    ctx.strokeStyle = color("--grid"); ctx.fillStyle = color("--dim"); ctx.lineWidth = 1;
    ctx.textAlign = "center"; ctx.textBaseline = "top";
    for (const t of x.ticks || ticks(x.min, x.max, Math.max(2, pw / 90), x.whole)) {
      const at = sx(t + (x.shift || 0));
      if (x.grid !== false) { ctx.beginPath(); ctx.moveTo(at, m.top); ctx.lineTo(at, m.top + ph); ctx.stroke(); }
      ctx.fillText((x.name || fmt)(t), at, m.top + ph + 5);
    }
    ctx.textAlign = "right"; ctx.textBaseline = "middle";
    for (const t of y.ticks || ticks(y.min, y.max, Math.max(2, ph / 34), y.whole)) {
      const at = sy(t + (y.shift || 0));
      if (y.grid !== false) { ctx.beginPath(); ctx.moveTo(m.left, at); ctx.lineTo(m.left + pw, at); ctx.stroke(); }
      ctx.fillText((y.name || fmt)(t), m.left - 6, at);
    }
    ctx.fillStyle = color("--ink"); ctx.textAlign = "center"; ctx.textBaseline = "bottom";
    ctx.fillText(x.label, m.left + pw / 2, h - 2);
    ctx.save(); ctx.translate(12, m.top + ph / 2); ctx.rotate(-Math.PI / 2); ctx.textBaseline = "middle"; ctx.fillText(y.label, 0, 0); ctx.restore();
    const frame = () => { ctx.strokeStyle = color("--line"); ctx.strokeRect(m.left + .5, m.top + .5, pw - 1, ph - 1); };
    return { sx, sy, m, pw, ph, frame };
  };

  /* A map of values[row][column]; NaN is a hole. Rows go down. */
  const heat = (ctx, w, h, values, nx, ny, { x, y, unit, low, high, format, tell }) => {
    const names = y.values, every = Math.max(1, Math.ceil(ny / Math.max(2, (h - 48) / 15)));
    const plot = axes(ctx, w, h, { min: 0, max: nx, grid: false, ...x },
      { min: ny, max: 0, grid: false, shift: .5, label: y.label, ticks: names.map((_, i) => i).filter((i) => i % every === 0), name: (i) => String(names[i]) }, 86);
    if (nx && ny) {
      const image = new ImageData(nx, ny), hole = rgb(color("--hole"));
      for (let i = 0; i < nx * ny; i++) {
        const c = Number.isNaN(values[i]) ? hole : ramp(high > low ? (values[i] - low) / (high - low) : 0);
        image.data.set([c[0], c[1], c[2], 255], 4 * i);
      }
      const off = document.createElement("canvas"); off.width = nx; off.height = ny;
      off.getContext("2d").putImageData(image, 0, 0);
      ctx.imageSmoothingEnabled = false;
      ctx.drawImage(off, plot.m.left, plot.m.top, plot.pw, plot.ph);
    }
    plot.frame();
    const bx = w - 70, grad = ctx.createLinearGradient(0, plot.m.top + plot.ph, 0, plot.m.top + 16);
    for (let i = 0; i <= 8; i++) grad.addColorStop(i / 8, `rgb(${ramp(i / 8).join(",")})`);
    ctx.fillStyle = grad; ctx.fillRect(bx, plot.m.top + 16, 12, plot.ph - 16);
    ctx.fillStyle = color("--dim"); ctx.textAlign = "left"; ctx.textBaseline = "middle";
    ctx.fillText(unit, bx, plot.m.top + 5);
    for (const [t, v] of [[0, low], [.5, (low + high) / 2], [1, high]]) ctx.fillText(format(v), bx + 16, plot.m.top + plot.ph - t * (plot.ph - 22) - 4 * (1 - t));
    return (px, py) => {
      const i = Math.floor((px - plot.m.left) / plot.pw * nx), j = Math.floor((py - plot.m.top) / plot.ph * ny);
      return i >= 0 && j >= 0 && i < nx && j < ny ? tell(i, j, values[j * nx + i]) : "";
    };
  };

  const lines = (ctx, w, h, x, y, series) => {
    const plot = axes(ctx, w, h, x, y);
    for (const { values, tone, width = 1.6 } of series) {
      ctx.strokeStyle = color(tone); ctx.lineWidth = width; ctx.beginPath();
      let on = false;
      values.forEach((v, i) => {
        if (v === null || Number.isNaN(v)) { on = false; return; }
        on ? ctx.lineTo(plot.sx(i + .5), plot.sy(v)) : ctx.moveTo(plot.sx(i + .5), plot.sy(v));
        on = true;
      });
      ctx.stroke();
    }
    plot.frame();
    return plot;
  };

  /* Bars on each other: parts are {values, tone, name}; across = false draws them from left to right. */
  const stacked = (ctx, w, h, x, y, parts, tell) => {
    const plot = axes(ctx, w, h, x, y), n = parts[0].values.length, gap = plot.pw / n > 5 ? 1 : 0;
    for (let i = 0; i < n; i++) {
      let at = y.min;
      for (const { values, tone } of parts) {
        const v = values[i] || 0;
        ctx.fillStyle = color(tone);
        ctx.fillRect(plot.sx(i), plot.sy(at + v), Math.max(1, plot.sx(i + 1) - plot.sx(i) - gap), plot.sy(at) - plot.sy(at + v));
        at += v;
      }
    }
    plot.frame();
    return (px) => {
      const i = Math.floor((px - plot.m.left) / plot.pw * n);
      return i >= 0 && i < n ? tell(i) : "";
    };
  };

  // ---- tables

  /* Columns are {name, text?, format?}; the search box keeps rows that have all its words. */
  const table = (parent, title, columns, rows, { note = "", match = null } = {}) => {
    const body = el("tbody"), count = el("p", { className: "note" });
    const item = { sort: null, down: true, draw: () => {
      const words = wanted.text.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = rows.filter((row) => {
        if (!words.length) return true;
        if (match && (wanted.layer !== null || wanted.expert !== null)) return match(row);
        const all = row.map((v, i) => (columns[i].format || fmt)(v)).join(" ").toLowerCase();
        return words.every((word) => all.includes(word));
      });
      item.matches = shown.length;
      if (item.sort !== null) {
        const s = item.sort, sign = item.down ? -1 : 1;
        shown = [...shown].sort((a, b) => sign * (typeof a[s] === "string" ? a[s].localeCompare(b[s]) : (a[s] ?? -Infinity) - (b[s] ?? -Infinity)));
      }
      body.replaceChildren(...shown.slice(0, 200).map((row) => el("tr", {}, ...row.map((v, i) =>
        el("td", { className: columns[i].text ? "text" : "", textContent: (columns[i].format || fmt)(v) })))));
      count.textContent = `${fmt(Math.min(200, shown.length))} of ${fmt(rows.length)} rows${shown.length < rows.length ? `, ${fmt(shown.length)} found` : ""}${note ? `; ${note}` : ""}`;
    } };
    const head = columns.map((c, i) => {
      const cell = el("th", { className: c.text ? "text" : "", textContent: c.name, tabIndex: 0, scope: "col" });
      const sort = () => { item.down = item.sort === i ? !item.down : !c.text; item.sort = i; item.draw(); };
      cell.addEventListener("click", sort);
      cell.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
      return cell;
    });
    parent.append(el("figure", {}, el("figcaption", {}, el("div", {}, el("h3", { textContent: title }), count)),
      el("div", { className: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ...head)), body))));
    tables.push(item);
  };

  const start = (s, kind, sub, cards) => {
    const section = el("section", {}, el("h2", { textContent: s.file }), el("p", { className: "sub", textContent: `${kind} · ${sub}` }),
      el("div", { className: "cards" }, ...cards.map(([name, value]) => el("div", { className: "card" }, el("b", { textContent: value }), el("span", { textContent: name })))));
    section.dataset.kind = s.kind;
    main.append(section);
    return section;
  };
  const select = (options, change) => {
    const made = el("select", {}, ...options.map(([value, name]) => el("option", { value, textContent: name })));
    made.addEventListener("change", () => { change(made.value); drawAll(); });
    return made;
  };

  // ---- rounds of draft and verification

  const drafts = (section, d) => {
    if (!d) return;
    const v = d.series, n = v.accepted.length, mib = (name) => v[name].map((value) => (value || 0) / MIB), some = (name) => v[name].some((value) => value !== null);
    const each = d.width > 1 ? ` (mean of ${d.width})` : "", named = (i) => d.width > 1 ? `rounds ${i * d.width} to ${Math.min(d.rounds, (i + 1) * d.width) - 1}` : `round ${i}`;
    const x = { min: 0, max: n, label: `round, from 0${each}`, name: (t) => fmt(Math.round(t * d.width)), whole: d.width === 1 };
    const top = (parts) => Math.max(...parts[0].map((_, i) => parts.reduce((a, p) => a + (p[i] || 0), 0))) * 1.05 || 1;
    section.append(el("div", { className: "cards drafts" }, ...[["rounds", fmt(d.rounds)], ["tokens per round", fmt(d.length)], ["drafted tokens accepted", d.drafted ? percent(d.accepted / d.drafted) : "–"],
      ["read to verify", bytes(d.verify_bytes)], ["of it for rejected tokens", d.verify_bytes ? percent(d.rejected_bytes / d.verify_bytes) : "–"], ["read to draft", bytes(d.draft_bytes)]]
      .map(([name, value]) => el("div", { className: "card" }, el("b", { textContent: value }), el("span", { textContent: name })))));
    const own = v.accepted.map((value) => 1), rejected = v.drafted.map((value, i) => value - v.accepted[i]);
    figure(section, "Drafts: tokens of each round", 220, (ctx, w, h) => stacked(ctx, w, h, x, { min: 0, max: top([own, v.drafted]), label: "tokens" },
      [{ values: own, tone: "--c0" }, { values: v.accepted, tone: "--c2" }, { values: rejected, tone: "--c1" }],
      (i) => `${named(i)}\n${fmt(v.accepted[i] + 1)} tokens of text: the model's own and ${fmt(v.accepted[i])} of ${fmt(v.drafted[i])} drafted`),
      { legend: [["the model's own", "--c0"], ["accepted", "--c2"], ["rejected", "--c1"]] });
    const rates = d.acceptance;
    if (rates.length) figure(section, "Drafts: acceptance by position", 200, (ctx, w, h) => stacked(ctx, w, h, { min: 0, max: rates.length, label: "position in a draft, from 1", shift: .5, grid: false, ticks: rates.map((_, i) => i), name: (i) => String(i + 1) },
      { min: 0, max: 1, label: "accepted (%)", name: (t) => fmt(100 * t) }, [{ values: rates, tone: "--c2" }], (i) => `position ${i + 1}: ${percent(rates[i])} of those reached`),
      { note: "Of the drafts whose tokens before were all accepted." });
    if (some("live") || some("demanded")) {
      const series = [["demanded", "--c1", "asked for by the routers"], ["live", "--c0", "left by routing policies"]].filter(([name]) => some(name));
      figure(section, "Drafts: entries that a round uses", 220, (ctx, w, h) => {
        const plot = lines(ctx, w, h, x, { min: 0, max: Math.max(...series.flatMap(([name]) => v[name])) * 1.05 || 1, label: "entries of all layers" }, series.map(([name, tone], i) => ({ values: v[name], tone, width: i ? 1.4 : 2.6 })));
        return (px) => { const i = Math.floor((px - plot.m.left) / plot.pw * n); return i >= 0 && i < n ? [named(i), ...series.map(([name, , said]) => `${fmt(v[name][i])} ${said}`)].join("\n") : ""; };
      }, { legend: series.map(([, tone, said]) => [said, tone]), note: "Each entry once per layer, whichever tokens of the batch use it." });
    }
    if (some("verify_bytes")) {
      const waste = mib("rejected_bytes"), used = mib("verify_bytes").map((value, i) => Math.max(0, value - waste[i])), draft = mib("draft_bytes");
      figure(section, "Drafts: read in each round", 220, (ctx, w, h) => stacked(ctx, w, h, x, { min: 0, max: top([used, waste, draft]), label: "MiB" },
        [{ values: used, tone: "--c0" }, { values: waste, tone: "--c1" }, { values: draft, tone: "--c3" }],
        (i) => `${named(i)}\n${fmt(used[i])} MiB for tokens of the text\n${fmt(waste[i])} MiB for rejected ones alone\n${fmt(draft[i])} MiB to draft`),
        { legend: [["for tokens of the text", "--c0"], ["for rejected tokens alone", "--c1"], ["to draft", "--c3"]] });
    }
    const cell = (value) => value === null ? "–" : fmt(value / MIB);
    table(section, "Rounds", [{ name: "round" }, { name: "drafted" }, { name: "accepted" }, { name: "entries asked for" }, { name: "entries used" }, { name: "MiB to verify", format: cell }, { name: "MiB for rejected", format: cell }, { name: "MiB to draft", format: cell }],
      v.accepted.map((_, i) => [i * d.width, v.drafted[i], v.accepted[i], v.demanded[i], v.live[i], v.verify_bytes[i], v.rejected_bytes[i], v.draft_bytes[i]]), { note: d.width > 1 ? `means of ${d.width} rounds` : "" });
  };

  // ---- a routing trace

  const route = (s) => {
    const cell = u32(s.cell), count = u32(s.count), miss = u32(s.miss), L = s.layers.length, E = s.experts, B = s.bins;
    const sums = () => new Float64Array(L * B);
    const looked = sums(), missed = sums(), distinct = sums(), kept = sums();
    const use = new Float64Array(L * E), useMiss = new Float64Array(L * E), total = new Float64Array(B), totalMiss = new Float64Array(B);
    const of = Array.from({ length: L * B }, () => null);
    for (let k = 0; k < cell.length; k++) {
      const b = cell[k] % B, le = (cell[k] - b) / B, e = le % E, l = (le - e) / E, at = l * B + b;
      looked[at] += count[k]; missed[at] += miss[k]; distinct[at] += 1;
      if (k && cell[k - 1] === cell[k] - 1 && b) kept[at] += 1;
      use[le] += count[k]; useMiss[le] += miss[k]; total[b] += count[k]; totalMiss[b] += miss[k];
      (of[at] ||= []).push(k);
    }
    const rows = total.reduce((a, b) => a + b, 0), misses = totalMiss.reduce((a, b) => a + b, 0);
    const section = start(s, "Routing trace", `${s.model} · ${s.arch} · ${s.used} of ${E} experts per layer, ${L} layers with experts`, [
      ["tokens", fmt(s.tokens)], ["of a prompt", fmt(s.prompt)], ["routed experts", fmt(s.rows)], ["hit rate of decode", percent(s.decode_hit_rate)], ["hit rate in all", rows ? percent(1 - misses / rows) : "–"],
      ["experts read", bytes(s.read_bytes)], ["per decoded token", s.tokens > s.prompt ? bytes(s.decode_bytes / (s.tokens - s.prompt)) : "–"]]);
    if (!rows) { section.append(el("p", { textContent: "No routing is in it." })); return; }
    const tokensOf = (b) => s.width === 1 ? `token ${b} (turn ${s.turn[b]}, ${s.phase[b] ? "decode" : "prompt"}, position ${s.step[b]})`
      : `tokens ${b * s.width} to ${Math.min(s.tokens, (b + 1) * s.width) - 1}`;
    const x = { label: `token, from 0${s.width > 1 ? ` (${s.width} in a column)` : ""}`, name: (t) => fmt(Math.round(t * s.width)) };
    let what = "hit";
    const kinds = { hit: ["hit rate", "hits"], distinct: ["different experts used", "experts"], kept: ["of them also used in the column before", "share"] };
    const height = () => Math.max(190, Math.min(560, 60 + L * 13));
    figure(section, "Layers over time", height, (ctx, w, h) => {
      const values = new Float64Array(L * B).fill(NaN);
      let high = 1;
      const only = wanted.expert !== null && wanted.expert < E ? wanted.expert : null;
      if (only !== null) {
        high = 0;
        for (let i = 0; i < L * B; i++) for (const k of of[i] || []) if (Math.floor(cell[k] / B) % E === only) { values[i] = count[k]; high = Math.max(high, count[k]); }
      } else for (let i = 0; i < L * B; i++) if (looked[i]) values[i] = what === "hit" ? 1 - missed[i] / looked[i] : what === "distinct" ? distinct[i] : i % B ? kept[i] / distinct[i] : NaN;
      if (only === null && what === "distinct") high = Math.max(...distinct);
      const share = only === null && what !== "distinct";
      return heat(ctx, w, h, values, B, L, { x, y: { values: s.layers, label: "layer" }, unit: only !== null ? `uses of ${only}` : kinds[what][1], low: 0, high, format: share ? (v) => `${Math.round(100 * v)} %` : fmt,
        tell: (b, l) => {
          const all = (of[l * B + b] || []).map((k) => [Math.floor(cell[k] / B) % E, count[k], miss[k]]).sort((p, q) => q[1] - p[1]);
          const named = all.slice(0, 24).map(([e, c, m]) => `${e}${c > 1 ? `×${c}` : ""}${m ? " (read)" : ""}`).join(", ");
          return `layer ${s.layers[l]}, ${tokensOf(b)}\n${looked[l * B + b] ? `hit rate ${percent(1 - missed[l * B + b] / looked[l * B + b])}` : "not routed"}\nexperts: ${named}${all.length > 24 ? ", …" : ""}`;
        } });
    }, { note: "Search for an expert (“expert 17”) to see where it is used.", control: select([["hit", "colour: hit rate"], ["distinct", "colour: different experts"], ["kept", "colour: also in the column before"]], (v) => { what = v; }), label: "Heat map of steps and layers" });

    let layer = 0;
    const chosen = select(s.layers.map((n, i) => [i, `layer ${n}`]), (v) => { layer = Number(v); });
    figure(section, "Experts of one layer over time", () => Math.max(220, Math.min(560, 60 + E * 5)), (ctx, w, h) => {
      if (wanted.layer !== null && s.layers.includes(wanted.layer)) { layer = s.layers.indexOf(wanted.layer); chosen.value = String(layer); }
      const values = new Float64Array(E * B).fill(NaN), missing = new Float64Array(E * B);
      let high = 1;
      for (let b = 0; b < B; b++) for (const k of of[layer * B + b] || []) {
        const e = Math.floor(cell[k] / B) % E;
        values[e * B + b] = count[k]; missing[e * B + b] = miss[k]; high = Math.max(high, count[k]);
      }
      return heat(ctx, w, h, values, B, E, { x, y: { values: Array.from({ length: E }, (_, e) => e), label: `expert of layer ${s.layers[layer]}` }, unit: "uses", low: 0, high, format: fmt,
        tell: (b, e, v) => `layer ${s.layers[layer]}, expert ${e}, ${tokensOf(b)}\n${Number.isNaN(v) ? "not used" : `used ${fmt(v)} times, read for ${fmt(missing[e * B + b])} of them`}` });
    }, { control: chosen, note: "A row is an expert; what is grey was not used." });

    const windowed = Array.from(total, (n, b) => {
      const from = Math.max(0, b - Math.max(1, Math.ceil(32 / s.width)) + 1);
      let a = 0, m = 0;
      for (let i = from; i <= b; i++) { a += total[i]; m += totalMiss[i]; }
      return a ? 1 - m / a : NaN;
    });
    let sumAll = 0, sumMiss = 0;
    const cumulative = Array.from(total, (n, b) => { sumAll += n; sumMiss += totalMiss[b]; return sumAll ? 1 - sumMiss / sumAll : NaN; });
    const span = Math.max(1, Math.ceil(32 / s.width)) * s.width;
    figure(section, "Hit rate over time", 230, (ctx, w, h) => {
      const plot = lines(ctx, w, h, { min: 0, max: B, ...x }, { min: 0, max: 1, label: "experts in memory (%)", name: (v) => fmt(100 * v) },
        [{ values: windowed, tone: "--c0" }, { values: cumulative, tone: "--c1" }]);
      return (px) => { const b = Math.floor((px - plot.m.left) / plot.pw * B); return b >= 0 && b < B ? `${tokensOf(b)}\nlast ${span} tokens ${percent(windowed[b])}\nsince the beginning ${percent(cumulative[b])}` : ""; };
    }, { legend: [[`over the last ${span} tokens`, "--c0"], ["since the beginning", "--c1"]] });
    const perToken = s.bytes.map((v, b) => v / MIB / Math.min(s.width, s.tokens - b * s.width));
    figure(section, "Read per token", 200, (ctx, w, h) => stacked(ctx, w, h, { min: 0, max: B, ...x },
      { min: 0, max: Math.max(...perToken) * 1.05 || 1, label: "MiB per token" }, [{ values: perToken, tone: "--c0" }], (b) => `${tokensOf(b)}\n${fmt(perToken[b])} MiB per token`));

    const most = Math.max(...use);
    figure(section, "Hot experts per layer", height, (ctx, w, h) => {
      const values = Float64Array.from(use, (v) => v || NaN);
      return heat(ctx, w, h, values, E, L, { x: { label: "expert", whole: true, shift: .5 }, y: { values: s.layers, label: "layer" }, unit: "uses", low: 0, high: most, format: (v) => fmt(Math.round(v)),
        tell: (e, l) => `layer ${s.layers[l]}, expert ${e}\nused ${fmt(use[l * E + e])} times, read ${fmt(useMiss[l * E + e])} times` });
    }, { note: "How often each expert was used in the whole trace." });
    const perLayer = s.layers.map((_, l) => { let t = 0; for (let e = 0; e < E; e++) t += use[l * E + e]; return t; });
    const list = [];
    for (let l = 0; l < L; l++) for (let e = 0; e < E; e++) if (use[l * E + e]) list.push([s.layers[l], e, use[l * E + e], use[l * E + e] / perLayer[l], 1 - useMiss[l * E + e] / use[l * E + e]]);
    list.sort((a, b) => b[3] - a[3]);
    table(section, "Experts", [{ name: "layer" }, { name: "expert" }, { name: "uses" }, { name: "share of its layer", format: percent }, { name: "hit rate", format: percent }], list,
      { note: "hottest first; a click on a name sorts", match: (row) => (wanted.layer === null || row[0] === wanted.layer) && (wanted.expert === null || row[1] === wanted.expert) });
    drafts(section, s.drafts);
  };

  // ---- an I/O trace

  const io = (s) => {
    const section = start(s, "I/O trace", `${s.model}${s.direct === "1" ? " · direct I/O" : s.direct === "0" ? " · buffered I/O" : ""}`, [
      ["reads", fmt(s.reads)], ["read", bytes(s.bytes)], ["of it ahead", s.bytes ? percent(s.ahead_bytes / s.bytes) : "–"], ["median until there", seconds(s.median_s)],
      ["99 % until there", seconds(s.p99_s)], ["cancelled", fmt(s.cancelled)], ["failed", fmt(s.failed)]]);
    if (!s.reads) { section.append(el("p", { textContent: "No read is in it." })); return; }
    const rate = (values) => values.map((v) => v / MIB / s.bin_s), demand = rate(s.demand), ahead = rate(s.read_ahead);
    const high = Math.max(...demand.map((v, i) => v + ahead[i])) * 1.05 || 1;
    figure(section, "Throughput over time", 220, (ctx, w, h) => stacked(ctx, w, h, { min: 0, max: demand.length, label: "time since the first read (s)", ticks: ticks(0, s.span, 8).map((t) => t / s.bin_s), name: (t) => fmt(t * s.bin_s) },
      { min: 0, max: high, label: "MiB/s" }, [{ values: demand, tone: "--c0" }, { values: ahead, tone: "--c1" }], (i) => `at ${seconds(i * s.bin_s)}: ${fmt(demand[i])} MiB/s demanded, ${fmt(ahead[i])} ahead`),
      { legend: [["demanded", "--c0"], ["read ahead", "--c1"]], note: `In steps of ${seconds(s.bin_s)}.` });
    const decades = [1e-5, 1e-4, 1e-3, 1e-2, .1, 1, 10], low = Math.log10(s.edges[0]), top = Math.log10(s.edges[s.edges.length - 1]), n = s.latency.length;
    figure(section, "From asking for a read to using it", 220, (ctx, w, h) => stacked(ctx, w, h, { min: 0, max: n, label: "time (logarithmic)", ticks: decades.map((d) => (Math.log10(d) - low) / (top - low) * n), name: (t) => seconds(10 ** (low + t / n * (top - low))) },
      { min: 0, max: Math.max(...s.latency) * 1.05, label: "reads" }, [{ values: s.latency, tone: "--c2" }], (i) => `${seconds(s.edges[i])} to ${seconds(s.edges[i + 1])}: ${fmt(s.latency[i])} reads`),
      { note: "What the engine saw: until it waited for the read and had it, which may be later than the device." });
    const layers = s.by_layer.map((row) => row[0]), mib = s.by_layer.map((row) => row[2] / MIB);
    figure(section, "Read per layer", 200, (ctx, w, h) => stacked(ctx, w, h, { min: 0, max: layers.length, label: "layer", shift: .5, ticks: layers.map((_, i) => i).filter((i) => i % Math.ceil(layers.length / 24) === 0), name: (i) => String(layers[i]), grid: false },
      { min: 0, max: Math.max(...mib) * 1.05 || 1, label: "MiB" }, [{ values: mib, tone: "--c0" }], (i) => `layer ${layers[i]}: ${fmt(mib[i])} MiB`));
    table(section, "Layers", [{ name: "layer" }, { name: "reads" }, { name: "MiB", format: (v) => fmt(v / MIB) }, { name: "ahead" }, { name: "mean until there", format: seconds }, { name: "mean read", format: (v) => v === null ? "–" : bytes(v) }],
      s.by_layer, { match: (row) => wanted.layer === null || row[0] === wanted.layer });
    const decodes = { "-1": "none", 0: "the prompt", 1: "one token", 2: "a draft that is verified", 4: "a guess of the drafter" };
    if (s.by_phase.length) table(section, "Decodes that read", [{ name: "decode of", text: true, format: String }, { name: "reads" }, { name: "MiB", format: (v) => fmt(v / MIB) }],
      s.by_phase.map(([phase, reads, read]) => [decodes[phase] ?? String(phase), reads, read]));
  };

  // ---- a compute trace

  const compute = (s) => {
    const sum = (values) => values.reduce((a, b) => a + b, 0), each = s.by_layer, mean = (name) => sum(each[name]);
    const section = start(s, "Compute trace", `${s.model} · per ${s.detail}${s.detail === "node" ? ", each isolated: slower than the same run untraced" : ""}`, [
      ["decodes", fmt(s.decodes)], ["of single tokens", fmt(s.tokens)], ["computing per token", seconds(mean("compute_s"))],
      ...(s.detail === "layer" ? [["waiting for reads", seconds(mean("wait_s"))], ["managing", seconds(mean("manage_s"))]] : [])]);
    if (!s.decodes) { section.append(el("p", { textContent: "No decode is in it." })); return; }
    const parts = s.detail === "layer" ? [["compute_s", "--c0", "computing"], ["wait_s", "--c1", "waiting for reads"], ["manage_s", "--c2", "managing"]] : [["compute_s", "--c0", "computing"]];
    const legend = parts.map(([, tone, name]) => [name, tone]);
    const split = (values, x, title, tell, note) => {
      const ms = parts.map(([name, tone, said]) => ({ name: said, tone, values: values[name].map((v) => 1e3 * v) }));
      const high = Math.max(...ms[0].values.map((_, i) => sum(ms.map((p) => p.values[i])))) * 1.05 || 1;
      figure(section, title, 220, (ctx, w, h) => stacked(ctx, w, h, x, { min: 0, max: high, label: "ms" }, ms, (i) => `${tell(i)}\n${ms.map((p) => `${p.name} ${fmt(p.values[i])} ms`).join("\n")}`), { legend, note });
    };
    const named = (i) => s.layers[i] < 0 ? "–" : String(s.layers[i]);
    const x = { min: 0, max: s.bins, label: `decode, from 0${s.width > 1 ? ` (${s.width} in a column)` : ""}`, name: (t) => fmt(Math.round(t * s.width)) };
    split(s.series, x, "Time of each decode", (i) => `decode ${i * s.width}`, "The first is the prompt's.");
    split(each, { min: 0, max: s.layers.length, label: "layer (– is what belongs to none)", shift: .5, grid: false, ticks: s.layers.map((_, i) => i).filter((i) => i % Math.ceil(s.layers.length / 24) === 0), name: named },
      "Time per token and layer", (i) => `layer ${named(i)}`, s.detail === "layer" ? "A layer's time runs from its routing to the next one's: its experts, then the attention and router of the next." : "");
    const flat = Float64Array.from(s.cells.flat(), (v) => v * 1e3), sorted = Float64Array.from(flat).sort(), high = sorted[Math.floor(.99 * (sorted.length - 1))] || 1;
    figure(section, "Computing over time", Math.max(190, Math.min(560, 60 + s.layers.length * 13)), (ctx, w, h) => heat(ctx, w, h, flat, s.bins, s.layers.length,
      { x, y: { values: s.layers.map((_, i) => named(i)), label: "layer" }, unit: "ms", low: 0, high, format: fmt, tell: (i, j, v) => `layer ${named(j)}, decode ${i * s.width}\n${fmt(v)} ms` }), { note: "The brightest colour is the 99th percentile and what is above." });
    if (s.detail === "node") {
      const all = sum(s.ops.map((row) => row[2])) || 1, per = Math.max(1, s.tokens);
      const share = (v) => percent(v / all);
      table(section, "Operations, per token", [{ name: "operation", text: true, format: String }, { name: "nodes", format: (v) => fmt(v / per) }, { name: "time", format: (v) => seconds(v / per) }, { name: "share", format: share }], s.ops.map((row) => [...row, row[2]]));
      table(section, "Nodes, per token", [{ name: "node", text: true, format: String }, { name: "operation", text: true, format: String }, { name: "nodes", format: (v) => fmt(v / per) }, { name: "time", format: (v) => seconds(v / per) }, { name: "share", format: share }], s.nodes.map((row) => [...row, row[3]]), { note: "of all layers together" });
    }
  };

  // ---- a run record

  const run = (s) => {
    const v = s.summary, one = s.series, n = s.index.length;
    const section = start(s, "Run record", [s.model, s.arch, ...s.marks].filter(Boolean).join(" · ") || "no run line", [
      ["tokens", fmt(s.count)], ["tok/s", fmt(v.tok_s)], ["hit rate", percent(v.hit_rate)], ["read per token", v.bytes_per_token == null ? "–" : bytes(v.bytes_per_token)],
      ["prompt", seconds(v.prefill_s)], ["peak memory", v.peak_rss_bytes == null ? "–" : bytes(v.peak_rss_bytes)], ["ended by", fmt(v.stop ?? null)]]);
    for (const notice of s.notices) section.append(el("p", { className: "note", textContent: `notice: ${notice}` }));
    if (!n) { section.append(el("p", { textContent: "No token is in it." })); return; }
    const parts = [["compute_s", "--c0", "computing"], ["read_wait_s", "--c1", "waiting for reads"], ["manage_s", "--c2", "managing"], ["between_s", "--c3", "between tokens"]];
    // without streaming nothing is told apart: then all of the decode is one part
    const apart = one.compute_s.some((value) => value !== null);
    const shown = (apart ? parts : [["decode_s", "--c0", "decode"], parts[3]]).map(([name, tone, said]) => ({ name: said, tone, values: one[name].map((value) => value === null ? 0 : 1e3 * value) }));
    const first = s.index[0] === 0 ? 1 : 0, drawn = shown.map((p) => ({ ...p, values: n > first + 1 ? p.values.slice(first) : p.values }));
    const from = n > first + 1 ? first : 0, m = n - from;
    const high = Math.max(...drawn[0].values.map((_, i) => drawn.reduce((a, p) => a + p.values[i], 0))) * 1.05 || 1;
    const x = { min: 0, max: m, label: `token${s.width > 1 ? ` (mean of ${s.width})` : ""}`, name: (t) => fmt(Math.round((t + from) * s.width)) };
    figure(section, "Where the time of a token went", 240, (ctx, w, h) => stacked(ctx, w, h, x, { min: 0, max: high, label: "ms per token" }, drawn,
      (i) => `token ${s.index[i + from]} ${JSON.stringify(s.text[i + from])}\n${drawn.map((p) => `${p.name} ${fmt(p.values[i])} ms`).join("\n")}`),
      { legend: drawn.map((p) => [p.name, p.tone]), note: from ? "Without the first token, whose decode is the prompt's." : "" });
    if (one.lookups.some((value) => value)) {
      const rate = (back) => one.lookups.slice(from).map((_, i) => {
        let a = 0, b = 0;
        for (let j = Math.max(0, i - back + 1); j <= i; j++) { a += one.lookups[j + from] || 0; b += one.hits[j + from] || 0; }
        return a ? b / a : NaN;
      });
      let a = 0, b = 0;
      const last = rate(32), all = one.lookups.slice(from).map((value, i) => { a += value || 0; b += one.hits[i + from] || 0; return a ? b / a : NaN; });
      figure(section, "Hit rate over time", 220, (ctx, w, h) => {
        const plot = lines(ctx, w, h, x, { min: 0, max: 1, label: "experts in memory (%)", name: (value) => fmt(100 * value) }, [{ values: last, tone: "--c0" }, { values: all, tone: "--c1" }]);
        return (px) => { const i = Math.floor((px - plot.m.left) / plot.pw * m); return i >= 0 && i < m ? `token ${s.index[i + from]}\nlast 32 tokens ${percent(last[i])}\nsince the beginning ${percent(all[i])}` : ""; };
      }, { legend: [["over the last 32 tokens", "--c0"], ["since the beginning", "--c1"]] });
      const read = ["demand_bytes", "speculative_bytes"].map((name, k) => ({ tone: k ? "--c1" : "--c0", values: one[name].slice(from).map((value) => (value || 0) / MIB) }));
      figure(section, "Read per token", 200, (ctx, w, h) => stacked(ctx, w, h, x, { min: 0, max: Math.max(...read[0].values.map((value, i) => value + read[1].values[i])) * 1.05 || 1, label: "MiB per token" }, read,
        (i) => `token ${s.index[i + from]}\n${fmt(read[0].values[i])} MiB needed, ${fmt(read[1].values[i])} MiB ahead`), { legend: [["needed", "--c0"], ["read ahead", "--c1"]] });
    }
    table(section, "Tokens", [{ name: "token" }, { name: "text", text: true, format: (t) => JSON.stringify(t) }, { name: "decode", format: seconds }, { name: "read wait", format: seconds }, { name: "managing", format: seconds }, { name: "computing", format: seconds },
      { name: "hit rate", format: percent }, { name: "MiB read", format: (value) => value === null ? "–" : fmt(value / MIB) }],
      s.index.map((index, i) => [index, s.text[i], one.decode_s[i], one.read_wait_s[i], one.manage_s[i], one.compute_s[i], one.lookups[i] ? one.hits[i] / one.lookups[i] : null, one.demand_bytes[i]]));
    drafts(section, s.drafts);
  };

  // ---- all of it

  const drawAll = () => { for (const item of figures) item.draw(); };
  const look = () => {
    wanted.text = search.value.trim();
    const layer = /\b(?:layer|l)\s*(\d+)\b/i.exec(wanted.text), expert = /\b(?:expert|e)\s*(\d+)\b/i.exec(wanted.text);
    wanted.layer = layer ? Number(layer[1]) : null;
    wanted.expert = expert ? Number(expert[1]) : null;
    for (const item of tables) item.draw();
    found.textContent = wanted.text ? `${fmt(tables.reduce((a, t) => a + t.matches, 0))} rows found` : "";
    drawAll();
  };
  const show = { route, io, compute, run };
  for (const s of data.sections) show[s.kind](s);
  for (const item of tables) item.draw();
  drawAll();
  let due = 0;
  const later = (act) => () => { clearTimeout(due); due = setTimeout(act, 120); };
  search.addEventListener("input", later(look));
  addEventListener("resize", later(drawAll));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  main.dataset.ready = "yes";
})();
