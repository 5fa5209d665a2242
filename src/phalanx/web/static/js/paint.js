// Colours for canvases, read from the style sheet so that one place decides them.

let probe = null;
let cache = new Map();

export function colour(name) {
  if (!cache.has(name)) cache.set(name, resolve(name));
  return cache.get(name);
}

function resolve(name) {
  if (probe === null) {
    probe = document.createElement("span");
    probe.hidden = true;
    document.body.append(probe);
  }
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

const listeners = new Set();

// Calls back when the theme changed; returns what ends it.
export function onrepaint(callback) {
  listeners.add(callback);
  return () => listeners.delete(callback);
}

export function repaint() {
  cache = new Map();
  for (const callback of listeners) callback();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);

// Cividis (Nuñez, Anderton, Renslow 2018): even to the eye, and the same to the colour-blind. Nine of its stops.
const CIVIDIS = [
  [0, 32, 76],
  [0, 48, 111],
  [61, 73, 107],
  [91, 96, 108],
  [118, 119, 119],
  [150, 143, 119],
  [184, 170, 109],
  [219, 199, 93],
  [255, 233, 69],
];

export function ramp(share) {
  const at = Math.min(1, Math.max(0, share)) * (CIVIDIS.length - 1);
  const low = Math.min(CIVIDIS.length - 2, Math.floor(at));
  return CIVIDIS[low].map((value, index) => Math.round(value + (at - low) * (CIVIDIS[low + 1][index] - value)));
}

export const rampText = (share) => `rgb(${ramp(share).join(",")})`;

export const withAlpha = (text, alpha) => text.replace(/^rgb\(([^)]+)\)$/, `rgba($1, ${alpha})`);

export const SERIES = ["blue", "orange", "green", "purple", "sky", "gold", "red", "grey", "teal", "brown"];
