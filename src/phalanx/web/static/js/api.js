// The server's answers, with words for what goes wrong.

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

// Several parts of a page ask for the same thing in the same moment: they share one answer on its way.
const underway = new Map();

export function get(path, query = {}) {
  const url = address(path, query);
  if (!underway.has(url)) {
    const answer = ask(url).finally(() => underway.get(url) === answer && underway.delete(url));
    underway.set(url, answer);
  }
  return underway.get(url);
}

// A run has grown: an answer on its way may be older than that, and whoever asks now gets one of its own.
export const outdate = () => underway.clear();

// The same, once the server has worked it out: a walk over a long run takes it seconds.
export async function settled(path, hasLeft) {
  let answer = await get(path);
  while (answer.settled === false && !hasLeft()) {
    await pause(UNSETTLED_MS);
    answer = await get(path);
  }
  return answer;
}

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

export function address(path, query = {}) {
  const known = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const text = new URLSearchParams(known.map(([key, value]) => [key, String(value)])).toString();
  return `api/${path}${text ? `?${text}` : ""}`;
}

export const runPath = (name, rest = "") => `runs/${encodeURIComponent(name)}${rest}`;

const UNSETTLED_MS = 2000;
const BUSY_MS = 1500;
const MOST_TRIES = 40; // a minute: the largest runs are indexed in less

async function ask(url) {
  let answer = await once(url);
  for (let tries = 1; answer.status === 503 && tries < MOST_TRIES; tries += 1) {
    await pause(BUSY_MS); // a run so large that it is still being read
    answer = await once(url);
  }
  const body = await answer.json().catch(() => null);
  if (answer.ok && body !== null) return body;
  if (answer.status === 401)
    throw new ApiError("This server requires a token: open the address that phalanx web printed.", 401);
  throw new ApiError(
    typeof body?.error === "string" ? body.error : `The server answered ${answer.status} without a message.`,
    answer.status,
  );
}

async function once(url) {
  try {
    return await fetch(url, { headers: { accept: "application/json" }, credentials: "same-origin" });
  } catch {
    throw new ApiError(
      "The server does not respond. If it was stopped, start it again with phalanx web RUNS.",
      0,
    );
  }
}

const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 15000;

// Server-sent events of a run, through lost connections and restarted servers. Returns what ends it.
// A tab that nobody looks at lets go: a browser keeps six connections per server, and six tabs would use them up.
export function stream(name, { onprogress, onmarks, onend, onstate }) {
  let source = null;
  let timer = 0;
  let wait = FIRST_PAUSE_MS;
  let over = false;
  const close = () => {
    clearTimeout(timer);
    source?.close();
    source = null;
  };
  const again = () => {
    close();
    onstate("lost");
    timer = setTimeout(open, wait);
    wait = Math.min(wait * 2, LONGEST_PAUSE_MS);
  };
  const end = () => {
    over = true;
    document.removeEventListener("visibilitychange", look);
    close();
  };
  const look = () => {
    if (document.visibilityState === "hidden") close();
    else if (source === null && !over) open();
  };
  function open() {
    close();
    source = new EventSource(address(runPath(name, "/stream")));
    source.addEventListener("open", () => {
      wait = FIRST_PAUSE_MS;
      onstate("live");
    });
    source.addEventListener("progress", (event) => onprogress(parse(event.data)));
    source.addEventListener("marks", (event) => onmarks(parse(event.data)));
    source.addEventListener("end", (event) => {
      end();
      onstate("ended");
      onend(parse(event.data));
    });
    source.addEventListener("error", () => source !== null && again());
  }
  document.addEventListener("visibilitychange", look);
  open();
  return end;
}

function parse(text) {
  try {
    const value = JSON.parse(text);
    return value && typeof value === "object" ? value : {};
  } catch {
    return {};
  }
}
