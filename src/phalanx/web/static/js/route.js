// Where the page stands is in the address: a reload or a link shows the same thing.

export function here() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decode);
  return { parts, query: Object.fromEntries(new URLSearchParams(query)) };
}

export function link(parts, query = {}) {
  const known = Object.entries(query).filter(
    ([, value]) => value !== null && value !== undefined && value !== "" && value !== false,
  );
  const text = new URLSearchParams(known.map(([key, value]) => [key, String(value)])).toString();
  return `#/${parts.map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
}

export const go = (hash) => {
  location.hash = hash;
};

// Changes the address without a step of history, for states that one does not go back to.
export function stay(hash) {
  history.replaceState(null, "", hash);
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
