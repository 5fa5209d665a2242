// Numbers as `phalanx` writes them on the terminal (src/phalanx/units.py): three digits, the unit beside.

export const NONE = "–";

// A table's own entry: keys come from records, and "constructor" is a key of every object.
export const own = (table, key) => (Object.hasOwn(table, key) ? table[key] : undefined);

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const known = (format) => (value) => (isNumber(value) ? format(value) : NONE);

function three(value) {
  const size = Math.abs(value);
  if (size >= 1000) return whole(value);
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2);
}

function whole(value) {
  return Math.round(value).toLocaleString("en-US");
}

function scaled(value, scales, last) {
  for (const [suffix, scale, least = scale] of scales)
    if (Math.abs(value) >= least) return three(value / scale) + suffix;
  return last(value);
}

const COUNTS = [
  ["Q", 1e15],
  ["T", 1e12],
  ["B", 1e9],
  ["M", 1e6],
  ["k", 1e3],
];
const BYTES = [
  [" TB", 1e12],
  [" GB", 1e9],
  [" MB", 1e6],
  [" kB", 1e3],
];
const SECONDS = [
  [" years", 31557600, 63115200],
  [" days", 86400, 172800],
  [" h", 3600],
  [" min", 60, 120],
  [" s", 1],
  [" ms", 1e-3],
];
const JOULES = [
  [" GWh", 3.6e15],
  [" MWh", 3.6e9],
  [" kWh", 3.6e6, 3.6e5],
  [" kJ", 1e3],
];

export const integer = known(whole);
export const plural = (value, noun) => `${integer(value)} ${noun}${value === 1 ? "" : "s"}`;
export const count = known((value) => scaled(value, COUNTS, three));
export const bytes = known((value) => scaled(value, BYTES, (small) => `${small.toFixed(0)} B`));
export const seconds = known((value) =>
  value === 0 ? "0 s" : scaled(value, SECONDS, (small) => `${three(small * 1e6)} µs`),
);
export const percent = known((value) => `${(value * 100).toFixed(1)}%`);
export const signed = known((value) => {
  if (value >= 9) return `${three(value + 1)}×`; // percents of a thousand and more say nothing
  const text = Math.abs(value * 100).toFixed(1);
  return `${text === "0.0" ? "±" : value > 0 ? "+" : "−"}${text}%`;
});
export const money = known((usd) => {
  const size = Math.abs(usd);
  if (size >= 1e4) return `$${count(usd)}`;
  if (size > 0 && size < 0.01) return `$${usd.toPrecision(2)}`;
  return `$${size < 1000 ? usd.toFixed(2) : whole(usd)}`;
});
export const energy = known((joules) => scaled(joules, JOULES, (small) => `${three(small)} J`));
export const carbon = known((kg) => (Math.abs(kg) >= 1 ? `${count(kg)} kg` : `${three(kg * 1000)} g`));
export const plain = known((value) => {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e4) return count(value);
  if (size < 1e-3) return value.toExponential(2);
  return size < 1 ? value.toPrecision(3) : value.toFixed(size >= 100 ? 1 : 3);
});
export const watts = known((value) => `${count(value)} W`);

export function clock(t) {
  if (!isNumber(t) || Math.abs(t) > 1e11) return NONE;
  return new Date(t * 1000).toISOString().replace("T", " ").slice(0, 19) + " UTC";
}

export function ago(t, now = Date.now() / 1000) {
  if (!isNumber(t)) return NONE;
  const age = now - t;
  return age < 1 ? "now" : `${seconds(age)} ago`;
}

// The sliding window of effective training time: an hour, or less in a run that is shorter.
export function windowName(window) {
  return !isNumber(window) || Math.abs(window - 3600) < 1 ? "last hour" : `last ${seconds(window)}`;
}

const FORMATS = {
  s: seconds,
  bytes,
  B: bytes,
  By: bytes,
  "tokens/s": count,
  tokens: count,
  ratio: percent,
  W: watts,
  J: energy,
  samples: count,
  "°C": (value) => `${three(value)} °C`,
  usd: money,
  USD: money,
};

const PERCENT = new Set(["mfu", "utilization", "memory_pressure", "cumulative", "last_hour"]);

// One value of a series in words; the name decides where the unit alone is not enough (ratios).
export function reading(value, unit, name = "") {
  if (!isNumber(value)) return NONE;
  if (PERCENT.has(name)) return percent(value);
  return (own(FORMATS, unit) ?? plain)(value);
}

// Ticks of an axis: all in the unit of the largest, with the digits their distance needs.
export function ticks(values, unit, name = "") {
  const largest = Math.max(...values.map(Math.abs), 0);
  const [suffix, scale] = tickScale(largest, unit, name);
  const step = values.length > 1 ? Math.abs(values[1] - values[0]) / scale : 1;
  const digits = Math.min(6, Math.max(0, Math.ceil(-Math.log10(step || 1) - 1e-9)));
  const fixed = new Intl.NumberFormat("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return values.map((value) => (value === 0 ? "0" : fixed.format(value / scale) + suffix));
}

function tickScale(largest, unit, name) {
  if (PERCENT.has(name)) return ["%", 0.01];
  if (unit === "s") return SECONDS.find(([, scale, least = scale]) => largest >= least) ?? [" µs", 1e-6];
  if (unit === "bytes" || unit === "B" || unit === "By")
    return BYTES.find(([, scale]) => largest >= scale) ?? [" B", 1];
  if (unit === "J") return JOULES.find(([, scale, least = scale]) => largest >= least) ?? [" J", 1];
  return largest >= 1e4 ? COUNTS.find(([, scale]) => largest >= scale) : ["", 1];
}

const TITLES = {
  loss: "Loss",
  grad_norm: "Gradient norm",
  lr: "Learning rate",
  tokens_per_s: "Tokens per second",
  mfu: "MFU",
  duration_s: "Step time",
  noise_scale: "Gradient noise scale, samples",
  memory_bytes: "Memory",
  compute_s: "Compute",
  wait_s: "Not computing",
  data_s: "Wait for data",
  utilization: "Utilization",
  power_w: "Power",
  energy_j: "Energy",
  temperature_c: "Temperature",
  memory_pressure: "Memory pressure",
  collective_s: "Collectives",
  bytes_sent: "Bytes sent",
  expert_imbalance: "Expert imbalance",
  allocation_retries: "Allocation retries",
  compile_s: "Compilation",
  tokens: "Tokens per step",
  noise_trace: "Gradient noise, trace",
  grad_squared: "Gradient, squared norm",
  memory_limit_bytes: "Memory limit",
  collective_bytes: "Bytes of collectives",
  held: "Newest state held in memory",
  epoch: "Generation",
};

// A name of a series or an account as a person reads it.
export function title(name) {
  if (own(TITLES, name)) return TITLES[name];
  const text = String(name)
    .slice(0, 80)
    .replace(/_(s|bytes|w|j|c)$/, "")
    .replaceAll("_", " ");
  return text.charAt(0).toUpperCase() + text.slice(1);
}

const LAYOUT_AXES = [
  ["TP", "tensor"],
  ["CP", "context"],
  ["PP", "pipeline"],
  ["VPP", "virtual_pipeline"],
];

// The short name of a layout, as `phalanx plan` prints it in tables.
export function layoutName(layout) {
  if (typeof layout === "string") return layout;
  if (!layout || typeof layout !== "object") return NONE;
  const used = LAYOUT_AXES.filter(([, key]) => layout[key] > 1).map(([word, key]) => word + layout[key]);
  const grouped = layout.zero > 0 && layout.shard < layout.data * layout.context;
  const rest = [
    `ZeRO-${layout.zero}${grouped ? `/${layout.shard}` : ""}`,
    layout.expert > 1 ? `EP${layout.expert}` : "",
    `mbs${layout.micro_batch}`,
    layout.recompute !== "none" ? layout.recompute : "",
    layout.offload && layout.offload !== "none" ? `offload-${layout.offload}` : "",
  ];
  return [[...used, `DP${layout.data}`].join("·"), ...rest].filter(Boolean).join(" ");
}
