// Signs on a chart for what happened: each differs in shape, not only in colour.

import { colour } from "../paint.js";
import { isNumber } from "../units.js";

export function stroke(ctx, x1, y1, x2, y2) {
  ctx.beginPath();
  ctx.moveTo(x1, y1);
  ctx.lineTo(x2, y2);
  ctx.stroke();
}

// So many incidents are no longer told apart by lines over the whole height.
const CROWDED = 30;

export const isCrowded = (marks) => marks.filter((mark) => mark.kind === "incident").length > CROWDED;

export const MARKS = {
  incident(ctx, x, box, { crowded }) {
    const size = 5 * devicePixelRatio;
    ctx.setLineDash([]);
    ctx.strokeStyle = ctx.fillStyle = colour("orange");
    ctx.lineWidth = devicePixelRatio;
    stroke(ctx, x, box.top, x, box.top + (crowded ? 3 * size : box.height));
    ctx.beginPath();
    ctx.moveTo(x - size, box.top);
    ctx.lineTo(x + size, box.top);
    ctx.lineTo(x, box.top + size * 1.5);
    ctx.fill();
  },
  checkpoint(ctx, x, box) {
    const bottom = box.top + box.height;
    ctx.setLineDash([]);
    ctx.strokeStyle = colour("green");
    ctx.lineWidth = 2 * devicePixelRatio;
    stroke(ctx, x, bottom, x, bottom - 8 * devicePixelRatio);
  },
  epoch(ctx, x, box, { crowded }) {
    if (crowded) return;
    ctx.setLineDash([2 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.strokeStyle = colour("grey");
    ctx.lineWidth = devicePixelRatio;
    stroke(ctx, x, box.top, x, box.top + box.height);
  },
  evaluation(ctx, x, _, mark, plot, name) {
    if (name !== "loss" || !isNumber(mark.loss)) return;
    const [y, size] = [plot.valToPos(mark.loss, "y", true), 4 * devicePixelRatio];
    ctx.setLineDash([]);
    ctx.strokeStyle = colour("purple");
    ctx.lineWidth = 1.5 * devicePixelRatio;
    ctx.beginPath();
    ctx.moveTo(x, y - size);
    ctx.lineTo(x + size, y);
    ctx.lineTo(x, y + size);
    ctx.lineTo(x - size, y);
    ctx.closePath();
    ctx.stroke();
  },
};
