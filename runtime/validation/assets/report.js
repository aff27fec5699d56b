"use strict";
// Draws the page from the JSON embedded in it. A chart is a function from the data to an element; the last statement orders them.

const data = JSON.parse(document.getElementById("data").textContent);
const schedule = data.bundle.schedule;
const depth = data.bundle.model.layers;
const WIDE = 1040, HALF = 490;
const BATCH_COLORS = ["var(--accent)", "var(--second)", "var(--third)", "var(--good)", "var(--soft)"];

// null: measured, but NaN or infinite
const number = (value, digits = 2) => value == null ? "–" : value.toLocaleString("en", {minimumFractionDigits: digits, maximumFractionDigits: digits});
const exponential = (value) => value == null ? "–" : value.toExponential(1);
const percent = (value, digits = 0) => `${number(100 * value, digits)} %`;
const interval = (value) => `${number(value.value)} [${number(value.low)}, ${number(value.high)}]`;
const spread = (summary) => `± ${percent((summary.high - summary.low) / 2 / summary.median, 1)}`;
const bytes = (value) => value >= 2 ** 30 ? `${number(value / 2 ** 30)} GiB` : `${number(value / 2 ** 20, 1)} MiB`;

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.filter((child) => child != null));
  return made;
}

function legend(entries) {
  return element("div", {class: "legend"},
    ...entries.map(([name, color]) => element("span", {}, element("i", {style: `background:${color}`}), name)));
}

function chart(name, title, caption, drawing, {wide = false, key = null} = {}) {
  return element("figure", {"data-chart": name, class: wide ? "wide" : ""},
    element("h3", {}, title), key && legend(key), drawing, element("figcaption", {}, caption));
}

function table(columns, rows, kind = "") {
  const cell = (value) => value && value.class ? element("td", {class: value.class}, value.text) : element("td", {}, value ?? "");
  return element("div", {class: `table ${kind}`}, element("table", {},
    element("thead", {}, element("tr", {}, ...columns.map((column) => element("th", {}, column)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map(cell))))));
}

const verdict = (holds) => ({class: holds ? "good" : "bad", text: holds ? "holds" : "does not hold"});

// a color itself, not a value for a color scale
const literal = (value) => ({value, scale: null});

function plot(options) {
  return Plot.plot({
    marginLeft: 56, marginBottom: 40, grid: true,
    style: {background: "none", color: "var(--ink)", fontSize: "12px", fontFamily: "inherit"},
    ...options,
  });
}

// the first position at which a layer is no longer active; the span if it always is
function activeUntil(layer) {
  const warmup = schedule.warmup_layers;
  const needed = layer < warmup ? layer + 1 : depth - layer + warmup;
  const end = schedule.layers.findIndex((count) => count < needed);
  return end < 0 ? schedule.layers.length : end;
}

function staircase() {
  const span = schedule.layers.length;
  const early = schedule.warmup_layers === depth;
  const rows = d3.range(depth).map((layer) => ({layer, end: activeUntil(layer), warm: !early && layer < schedule.warmup_layers}));
  const drawing = plot({
    width: WIDE, height: Math.max(180, Math.min(440, 13 * depth + 70)), grid: false,
    x: {label: `position ${schedule.anchor === "generated" ? "(generated tokens)" : "(from the first prompt token)"} →`, domain: [0, span]},
    y: {label: "layer", domain: d3.range(depth).reverse(), tickFormat: (layer) => layer % Math.ceil(depth / 12) ? "" : layer},
    marks: [
      Plot.barX(rows, {y: "layer", x1: 0, x2: span, fill: "var(--skipped)", inset: 0.7}),
      Plot.barX(rows, {y: "layer", x1: 0, x2: "end", fill: literal((row) => row.warm ? "var(--warm)" : "var(--active)"), inset: 0.7,
        title: (row) => `layer ${row.layer}: positions 0 to ${row.end - 1}${row.end === span ? " and on" : ""}`}),
    ],
  });
  const share = schedule.mean_layers / depth;
  return chart("staircase", "What each position computes",
    `Mean ${number(schedule.mean_layers, 1)} of ${depth} layers over ${span} positions: ${percent(share)} of the layers' work, a promise of `
    + `${number(schedule.speedup)}x. Later positions stay at the last count.`,
    drawing, {wide: true, key: [["warm-up", "var(--warm)"], ["active", "var(--active)"], ["skipped", "var(--skipped)"]]});
}

function positions(target) {
  const load = target.workloads[0];
  const series = [["full depth", "full_ms", "var(--soft)"], ["promised by the layers", "promised_ms", "var(--second)"],
    ["measured", "ms", "var(--accent)"]];
  const drawing = plot({
    width: WIDE, height: 300,
    x: {label: "position →"}, y: {label: "↑ ms per decode step", domain: [0, d3.quantile(load.positions.map((p) => p.full_ms).sort(d3.ascending), 0.97) * 1.15], clamp: true},
    marks: [
      Plot.ruleY([0]),
      ...series.map(([, field, color]) => Plot.lineY(load.positions,
        {x: "position", y: field, stroke: color, strokeWidth: field === "ms" ? 2.2 : 1.4, strokeDasharray: field === "promised_ms" ? "5 3" : null})),
      Plot.tip(load.positions, Plot.pointerX({x: "position", y: "ms", fill: "var(--card)", stroke: "var(--line)",
        title: (p) => `position ${p.position}: ${p.layers} layers\n${number(p.ms)} ms, promised ${number(p.promised_ms)}, full depth ${number(p.full_ms)}`})),
    ],
  });
  return chart("positions", "Latency of each position, promised and measured",
    `Batch ${load.batch}, ${data.settings.workload ? "first requests of the workload" : `${data.settings.prompt_tokens} prompt tokens`}; medians over the rounds. `
    + (load.decode_gain ? `Decoding is ${number(load.decode_gain.median)}x as fast as at full depth (${spread(load.decode_gain)}).` : ""),
    drawing, {wide: true, key: series.map(([name, , color]) => [name, color])});
}

const cells = (target) => target.latency.flatMap((cell) => cell.variants.map((variant) =>
  ({...variant, batch: cell.batch, context: cell.context, y: variant.ms.median, low: variant.ms.low, high: variant.ms.high})));

const layerColor = {type: "linear", interpolate: d3.interpolateHcl, range: ["#e08a3c", "#0b6e8f"], label: "layers"};

function latency(target) {
  const rows = cells(target);
  const batches = [...new Set(rows.map((row) => row.batch))];
  const drawing = plot({
    width: WIDE, height: 320, color: {...layerColor, legend: true},
    x: {type: "point", label: "context, tokens →", domain: [...new Set(rows.map((row) => row.context))].sort(d3.ascending)},
    y: {label: "↑ ms per decode step", zero: true}, fx: {label: "batch", domain: batches},
    marks: [
      Plot.frame({stroke: "var(--line)"}), Plot.ruleY([0]),
      Plot.lineY(rows, {fx: "batch", x: "context", y: "y", z: "name", stroke: "layers", strokeWidth: 1.6}),
      Plot.ruleX(rows, {fx: "batch", x: "context", y1: "low", y2: "high", stroke: "layers", strokeWidth: 3, strokeOpacity: 0.45}),
      Plot.dot(rows, {fx: "batch", x: "context", y: "y", fill: "layers", r: 3.2,
        title: (row) => `${row.name}, batch ${row.batch}, context ${row.context}: ${number(row.y)} ms (${spread(row.ms)}), gain ${number(row.gain.median)}x of ${number(row.promised_gain)}x`}),
    ],
  });
  return chart("latency", "Decode step by batch and context",
    "One line per variant; the thick part is the 95 % interval of the median. Variants took turns in every round.", drawing, {wide: true});
}

function prefill(target) {
  const rows = target.latency.map((cell) => ({...cell, ms: cell.prefill_ms.median, low: cell.prefill_ms.low, high: cell.prefill_ms.high, name: String(cell.batch)}));
  const drawing = plot({
    width: HALF, height: 320,
    x: {type: "point", label: "prompt, tokens a row →", domain: [...new Set(rows.map((row) => row.context))].sort(d3.ascending)},
    y: {label: "↑ ms", zero: true}, color: {legend: true, label: "batch", domain: [...new Set(rows.map((row) => row.name))], range: BATCH_COLORS, tickFormat: (name) => `batch ${name}`},
    marks: [
      Plot.ruleY([0]), Plot.lineY(rows, {x: "context", y: "ms", stroke: "name", z: "name"}),
      Plot.ruleX(rows, {x: "context", y1: "low", y2: "high", stroke: "name", strokeWidth: 3, strokeOpacity: 0.45}),
      Plot.dot(rows, {x: "context", y: "ms", fill: "name", r: 3.5, title: (row) => `batch ${row.batch}, ${row.context} tokens: ${number(row.ms, 1)} ms`}),
    ],
  });
  return chart("prefill", "Prefill", "All rows of the batch, with the bundle's schedule.", drawing);
}

function roofline(target) {
  const rows = cells(target).map((row) => ({...row, mb: row.read_bytes / 1e6, rows: String(row.batch)}));
  const [least, most] = d3.extent(rows, (row) => row.mb);
  const bound = [least * 0.8, most * 1.25].map((mb) => ({mb, ms: mb / target.read_gb_per_s}));
  const drawing = plot({
    width: HALF, height: 320,
    x: {type: "log", label: "MB that a step must read →", tickFormat: "~s"}, y: {type: "log", label: "↑ ms per decode step", tickFormat: "~g"},
    color: {legend: true, label: "batch", domain: [...new Set(rows.map((row) => row.rows))], range: BATCH_COLORS, tickFormat: (name) => `batch ${name}`},
    marks: [
      Plot.line(bound, {x: "mb", y: "ms", stroke: "var(--soft)", strokeDasharray: "5 3"}),
      Plot.dot(rows, {x: "mb", y: "y", stroke: "rows", fill: "rows", fillOpacity: 0.35, r: 3.5,
        title: (row) => `${row.name}, batch ${row.batch}, context ${row.context}: ${number(row.y)} ms, ${percent(row.share_of_bound)} of the bound`}),
    ],
  });
  return chart("roofline", "Roofline: how far from the memory bound",
    `The dashed line is the measured memory bandwidth, ${number(target.read_gb_per_s, 1)} GB/s: no step can lie below it unless its weights stay in the processor's caches.`, drawing);
}

// names the tokenizer if it is not sacrebleu's default: only BLEU scores with the same one are comparable
const bleuName = ([{bleu_tokenizer: tokenizer}]) => tokenizer === "13a" ? "BLEU" : `BLEU (${tokenizer})`;

function quality(target) {
  const bleu = bleuName(target.quality);
  const rows = target.quality.flatMap((row) => [[bleu, row.bleu], ["ROUGE-L", row.rouge_l]].map(([metric, value]) =>
    ({metric, name: row.name, speedup: row.schedule_speedup, own: row.own, ...value})));
  const drawing = plot({
    width: WIDE, height: 300, marginRight: 60,
    x: {label: "fewer layers, x →", domain: [0.8, d3.max(rows, (row) => row.speedup) + 0.3]}, y: {label: "↑ score", nice: true},
    fx: {label: null}, marks: [
      Plot.frame({stroke: "var(--line)"}),
      Plot.line(rows, {fx: "metric", x: "speedup", y: "value", stroke: "var(--soft)", sort: "speedup", z: "metric"}),
      Plot.ruleX(rows, {fx: "metric", x: "speedup", y1: "low", y2: "high", stroke: "var(--accent)", strokeWidth: 2}),
      Plot.dot(rows, {fx: "metric", x: "speedup", y: "value", r: 5, fill: literal((row) => row.own ? "var(--second)" : "var(--accent)"),
        title: (row) => `${row.name}: ${row.metric} ${interval(row)}`}),
    ],
  });
  const body = chart("quality", "Quality against speedup",
    `${data.settings.examples} examples, greedy; bars are 95 % bootstrap intervals. Orange is the bundle's own schedule. `
    + `Answers are cut off at ${data.settings.new_tokens} tokens (--new-tokens), which lowers their scores.`, drawing, {wide: true});
  const rowsOf = target.quality.map((row) => [row.name, `${number(row.schedule_speedup)}x`, number(row.mean_layers), interval(row.bleu),
    interval(row.rouge_l), row.bleu_loss ? interval(row.bleu_loss) : "", `${row.cut_off} of ${data.settings.examples}`]);
  const names = ["schedule", "fewer layers", "mean layers a step", bleu, "ROUGE-L", "BLEU lost against full depth", "cut off"];
  return [body, table(names, rowsOf)];
}

function memory(target) {
  const kind = data.bundle.targets.find((one) => one.name === target.name);
  const own = d3.sum(kind.segment_weight_bytes) + kind.head_weight_bytes;
  const apart = d3.sum(data.bundle.variants, (variant) => kind.head_weight_bytes + d3.sum(variant.segments, (index) => kind.segment_weight_bytes[index]));
  const rows = [
    ["weights, shared by all variants", own, "var(--accent)"],
    [`${data.bundle.variants.length} whole engines instead`, apart, "var(--skipped)"],
    ["KV buffer of a row, the schedule's shape", kind.kv_bytes_per_row, "var(--accent)"],
    ["KV buffer of a row without skipping", kind.kv_bytes_per_row_without_skipping, "var(--skipped)"],
    ["resident after load, whole process", target.memory.resident_bytes, "var(--second)"],
  ].map(([name, value, color]) => ({name, value, color}));
  const drawing = plot({
    width: WIDE, height: 210, marginLeft: 270, marginRight: 80, grid: false,
    x: {label: "MiB →", transform: (value) => value / 2 ** 20}, y: {label: null, domain: rows.map((row) => row.name)},
    marks: [
      Plot.barX(rows, {x: "value", y: "name", fill: literal((row) => row.color), insetTop: 4, insetBottom: 4}),
      Plot.text(rows, {x: "value", y: "name", text: (row) => bytes(row.value), textAnchor: "start", dx: 6, fill: "var(--ink)"}),
    ],
  });
  return chart("memory", "Memory", `A KV buffer row of ${data.bundle.limits.length_tokens} tokens, half of them prompt. Loaded in ${number(target.memory.load_s)} s.`,
    drawing, {wide: true});
}

function parity(target) {
  if (!target.parity) return element("p", {class: "soft"}, "Not compared with the reference: add --reference MODEL.");
  const worst = (row) => d3.max(row.kv.flatMap(({layer, ...errors}) => Object.values(errors))) ?? 0;  // 0: the variant's layers keep nothing
  return table(["variant", "largest logit error", "mean", "of the largest logit", "median step", "at most", "first token that differs", "largest KV error", ""],
    target.parity.map((row) => [row.name, exponential(row.max_logit_error), exponential(row.mean_logit_error),
      exponential(row.relative_error), exponential(row.median_error), `${Number(row.bound.toPrecision(3))} of ${row.bound_of}`,
      row.first_token_that_differs ?? "none", exponential(worst(row)), verdict(row.holds)]));
}

function plans(target) {
  if (!target.plans) return null;
  return table(["engine", "pass", "worst output against ONNX Runtime", "of its largest value", ""],
    target.plans.map((row) => [row.name, row.pass, row.output, exponential(row.relative_error), verdict(row.holds)]));
}

function workloads(target) {
  const ms = (summary, key) => summary ? number(summary[key]) : "";
  return table(["batch", "first token ms", "of", "token ms p50", "p90", "p99", "of", "tokens/s", "at full depth", "decode gain", "end to end"],
    target.workloads.map((load) => [String(load.batch), number(load.own.ttft_ms.median, 1), load.own.ttft_ms.n, ms(load.own.token_ms, "median"),
      ms(load.own.token_ms, "p90"), ms(load.own.token_ms, "p99"), load.own.token_ms ? load.own.token_ms.n : "", number(load.own.tokens_per_s.median, 1), number(load.full.tokens_per_s.median, 1),
      load.decode_gain ? `${number(load.decode_gain.median)}x ${spread(load.decode_gain)}` : "", `${number(load.end_to_end_gain.median)}x ${spread(load.end_to_end_gain)}`]));
}

function figures(target) {
  const load = target.workloads[0];
  const promised = load.positions.length ? d3.sum(load.positions, (p) => p.full_ms) / d3.sum(load.positions, (p) => p.promised_ms) : null;
  const own = target.quality && target.quality.find((row) => row.own);
  const entries = [
    [number(load.own.tokens_per_s.median, 1), `tokens/s at batch ${load.batch}; ${number(load.full.tokens_per_s.median, 1)} at full depth`],
    load.decode_gain && [`${number(load.decode_gain.median)}x`, promised == null ? "decode gain" : `decode gain, promised ${number(promised)}x`],
    load.own.token_ms && [number(load.own.token_ms.p99), `ms, p99 of ${load.own.token_ms.n} tokens`],
    [number(load.own.ttft_ms.median, 1), "ms to the first token"],
    target.parity && [exponential(target.parity.some((row) => row.relative_error == null) ? null : d3.max(target.parity, (row) => row.relative_error)), "largest error against the reference, of the largest logit"],
    own && [number(own.bleu.value, 1), `${bleuName(target.quality)} with the schedule; ${number(target.quality[0].bleu.value, 1)} at full depth`],
  ];
  return element("div", {class: "figures"}, ...entries.filter(Boolean).map(([value, text]) => element("div", {}, element("b", {}, value), element("span", {class: "soft"}, text))));
}

function section(target) {
  const title = data.targets.length > 1 ? `Target ${target.name}: ` : "";
  if (!target.runs) return [element("h2", {}, `Target ${target.name}`), element("p", {class: "soft"}, `Does not run here: ${target.why}`)];
  const grid = element("div", {class: "grid"}, target.workloads[0].positions.length ? positions(target) : null, latency(target), prefill(target), roofline(target));
  return [
    element("h2", {}, `${title}Is it correct?`), parity(target), ...[plans(target)].filter(Boolean),
    element("h2", {}, `${title}Is it fast enough?`), workloads(target), grid,
    element("h2", {}, `${title}Is it good enough?`),
    ...(target.quality ? quality(target) : [element("p", {class: "soft"}, "Not scored: add --eval FILE.jsonl.")]),
    element("h2", {}, `${title}How much memory does it take?`), element("div", {class: "grid"}, memory(target)),
  ];
}

function objectives() {
  return data.slo.length ? [element("h2", {}, "Objectives"),
    table(["", "target", "measured", ""], data.slo.map((row) => [row.slo, row.target, row.measured, verdict(row.holds)]))] : [];
}

function baseline() {
  if (!data.baseline) return [];
  const color = {slower: "bad", faster: "good", same: ""};
  return [element("h2", {}, "Against the baseline"),
    element("p", {class: "soft"}, "Slower or faster where the 95 % intervals of the medians lie apart, and the medians by more than a tenth."),
    ...data.baseline.differs.map((line) => element("p", {class: "bad"}, `Differs: ${line}`)),
    table(["", "then, ms", "now, ms", "ratio", ""], data.baseline.rows.map((row) =>
      [row.name, number(row.old_ms), number(row.new_ms), number(row.ratio), color[row.verdict] ? {class: color[row.verdict], text: row.verdict} : row.verdict]))];
}

function colophon() {
  const machine = data.machine, model = data.bundle.model;
  const rows = [
    ["machine", `${machine.cpu}, ${machine.cores} cores, ${machine.memory_gib} GiB, ${machine.system}${machine.gpu ? `, ${machine.gpu}` : ""}`],
    ["versions", [`Python ${machine.python}`, ...Object.entries(machine.libraries).map(([name, version]) => `${name} ${version}`)].join(", ")],
    ["model", `${model.type}, ${model.layers} layers x ${model.hidden_size}, ${model.heads} heads (${model.kv_heads} key/value) of ${model.head_size}, vocabulary ${model.vocabulary}, ${number(model.parameters / 1e6, 1)} M parameters`],
    ["bundle", `${bytes(data.bundle.bundle_bytes)}, ${data.bundle.segments.length} segments, ${data.bundle.variants.length} variants; ` + (data.integrity.holds ? `${data.integrity.files} files match the manifest` : `damaged: ${data.integrity.what}`)],
    ["measured", data.measured_at + (data.resumed ? `; ${data.resumed} measurements come from an earlier run that was stopped` : "")],
  ];
  return [element("h2", {}, "Machine, versions, bundle"), table(["", ""], rows, "facts")];
}

document.getElementById("page").append(
  element("header", {},
    element("div", {}, element("h1", {}, data.bundle.model.name),
      element("p", {class: "soft"}, `${depth} layers, schedule ${schedule.name}, ${schedule.layers[0]} to ${schedule.layers.at(-1)} layers over ${schedule.layers.length} positions`)),
    element("span", {class: `verdict ${data.holds ? "" : "fails"}`}, data.holds ? "all holds" : "does not hold")),
  ...data.targets.filter((target) => target.runs).slice(0, 1).map(figures),
  element("div", {class: "grid"}, staircase()),
  ...data.targets.flatMap(section),
  ...objectives(), ...baseline(), ...colophon());
