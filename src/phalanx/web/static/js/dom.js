// Elements out of data. Text is always a text node: nothing that a run wrote is ever read as HTML.

export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") element.className = value;
    else if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

export function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

export function fill(element, ...children) {
  element.replaceChildren();
  return append(element, children);
}

// Sets text only when it changed, so that a live page does not disturb a selection or a screen reader.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export const byId = (id) => document.getElementById(id);

export function announce(text) {
  say(byId("status"), text);
}

// A table: columns are {head, cell(row) -> text or node, kind?: "number", wide?: bool}.
export function table(columns, rows, { caption, unseen = true } = {}) {
  const heads = columns.map((column) => h("th", { scope: "col", class: column.kind }, column.head));
  const body = rows.map((row) =>
    h(
      "tr",
      {},
      columns.map((column, index) => cell(column, row, index)),
    ),
  );
  const content = h(
    "table",
    {},
    h("caption", { class: unseen ? "unseen" : null }, caption),
    h("thead", {}, h("tr", {}, heads)),
    h("tbody", {}, body),
  );
  return scroll(caption, content);
}

// A box that scrolls when its content is too wide, and only then is a stop for the keyboard.
export function scroll(label, ...children) {
  const box = h("div", { class: "scroll", data: { label } }, children);
  boxes.observe(box);
  return box;
}

const boxes = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const wide = target.scrollWidth > target.clientWidth;
    if (wide === target.hasAttribute("tabindex")) continue;
    if (wide) for (const [name, value] of stop(target)) target.setAttribute(name, value);
    else for (const [name] of stop(target)) target.removeAttribute(name);
  }
});

const stop = (box) => [
  ["tabindex", "0"],
  ["role", "region"],
  ["aria-label", box.dataset.label],
];

function cell(column, row, index) {
  const tag = index === 0 ? "th" : "td";
  return h(tag, { class: column.kind, scope: index === 0 ? "row" : null }, column.cell(row));
}

// Pairs of a word and what it is; an unknown value is left out.
export function facts(pairs) {
  const known = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h(
    "dl",
    { class: "facts" },
    known.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
  );
}

export function words(text, ...more) {
  return h("p", { class: "words" }, text, ...more);
}

// A row of buttons of which one is on.
export function choice(label, options, value, onpick) {
  const buttons = options.map(([key, text]) =>
    h(
      "button",
      { type: "button", "aria-pressed": String(key === value), onclick: () => onpick(key), data: { key } },
      text,
    ),
  );
  return h("div", { class: "choice", role: "group", "aria-label": label }, buttons);
}

export function pick(group, value) {
  for (const button of group.querySelectorAll("button"))
    button.setAttribute("aria-pressed", String(button.dataset.key === value));
}
