"use strict";
// Draws the charts at the width of the window, with logarithmic axes, zoom, and values under the pointer.
(() => {
  const page = JSON.parse(document.getElementById("data").textContent);
  const HEIGHT = 260, LEFT = 58, RIGHT = 14, TOP = 12, BOTTOM = 40, COLORS = 8, FEW = 60;
  const SVG = "http://www.w3.org/2000/svg";

  function short(value) {
    const size = Math.abs(value);
    if (size >= 1e15 || (size > 0 && size < 1e-3)) {
      return value.toExponential(2).replace("e+", "e").replace(".00e", "e");
    }
    for (const [limit, suffix] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "K"]]) {
      if (size >= limit) return Number((value / limit).toPrecision(3)) + suffix;
    }
    return String(Number(value.toPrecision(size < 100 ? 3 : 4)));
  }

  function ticks(low, high, num) {
    const rough = (high - low) / Math.max(num, 1);
    if (!(rough > 0)) return [low];
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = ([1, 2, 5].find((factor) => factor * power >= rough) || 10) * power;
    const all = [];
    for (let i = Math.ceil(low / step - 1e-9); i <= Math.floor(high / step + 1e-9); i++) all.push(i * step);
    return all;
  }

  function logTicks(low, high, num) {
    const all = [];
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++) {
      for (const factor of [1, 2, 5]) all.push(factor * 10 ** e);
    }
    const inside = all.filter((value) => value >= low * 0.999 && value <= high * 1.001);
    if (inside.length < 3) return ticks(low, high, num).filter((value) => value > 0);
    const decades = inside.filter((value) => Math.abs(Math.log10(value) % 1) < 1e-9);
    return inside.length > 2 * num && decades.length > 1 ? decades : inside;
  }

  function add(parent, name, attributes, text) {
    const node = document.createElementNS(SVG, name);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    if (text !== undefined) node.textContent = text;
    parent.appendChild(node);
    return node;
  }

  // A scale maps values to pixels and back. A logarithmic one shows positive values only.
  function scale(low, high, from, to, isLog) {
    const map = isLog ? Math.log10 : (value) => value;
    const back = isLog ? (value) => 10 ** value : (value) => value;
    const a = map(low), b = map(high);
    return {
      at: (value) => from + ((map(value) - a) / (b - a)) * (to - from),
      value: (pixel) => back(a + ((pixel - from) / (to - from)) * (b - a)),
    };
  }

  function range(values, isLog) {
    let low = Infinity, high = -Infinity;
    for (const value of values) {
      if (isLog && !(value > 0)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
    if (low > high) return isLog ? [1, 10] : [0, 1];
    const margin = 0.5 * Math.abs(low) || 0.5;
    return high > low ? [low, high] : [low - margin, high + margin];
  }

  class Chart {
    constructor(figure) {
      this.figure = figure;
      this.data = page.charts[Number(figure.dataset.chart)];
      this.svg = figure.querySelector("svg");
      this.log = { x: false, y: false };
      this.zoomed = null;
      this.tip = document.createElement("div");
      this.tip.className = "tip";
      this.tip.hidden = true;
      figure.appendChild(this.tip);
      this.addButtons();
      this.svg.addEventListener("pointermove", (event) => this.move(event));
      this.svg.addEventListener("pointerleave", () => this.leave());
      this.svg.addEventListener("pointerdown", (event) => { this.from = this.pixel(event); });
      this.svg.addEventListener("pointerup", (event) => this.release(event));
      this.svg.addEventListener("dblclick", () => { this.zoomed = null; this.draw(); });
      new ResizeObserver(() => this.draw()).observe(figure);
    }

    addButtons() {
      const place = this.figure.querySelector(".buttons");
      for (const axis of ["x", "y"]) {
        const button = document.createElement("button");
        button.textContent = "log " + axis;
        button.setAttribute("aria-pressed", "false");
        button.addEventListener("click", () => {
          this.log[axis] = !this.log[axis];
          button.setAttribute("aria-pressed", String(this.log[axis]));
          this.draw();
        });
        place.append(button, " ");
      }
    }

    pixel(event) {
      return event.clientX - this.svg.getBoundingClientRect().left;
    }

    draw() {
      const { svg, data, log } = this;
      const width = Math.max(this.figure.clientWidth, 200), bottom = HEIGHT - BOTTOM;
      let [x0, x1] = this.zoomed || range(data.lines.flatMap((line) => line.x), log.x);
      if (log.x && !(x0 > 0)) x0 = x1 / 1e3;
      const ys = [];
      for (const line of data.lines) {
        line.y.forEach((y, i) => { if (line.x[i] >= x0 && line.x[i] <= x1) ys.push(y); });
      }
      if (data.band && !log.y) ys.push(-data.band, data.band);
      let [y0, y1] = range(ys, log.y);
      const margin = 0.04 * (y1 - y0);
      if (!log.y) [y0, y1] = [y0 - margin, y1 + margin];
      this.x = scale(x0, x1, LEFT, width - RIGHT, log.x);
      this.y = scale(y0, y1, bottom, TOP, log.y);
      svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
      svg.replaceChildren();
      const id = "clip" + this.figure.dataset.chart;
      const clip = add(svg, "clipPath", { id });
      add(clip, "rect", { x: LEFT - 3, y: TOP - 4, width: width - LEFT - RIGHT + 6, height: bottom - TOP + 7 });
      if (data.band && !log.y) {
        const top = this.y.at(data.band), height = this.y.at(-data.band) - top;
        add(svg, "rect", { class: "band", x: LEFT, y: top, width: width - LEFT - RIGHT, height });
      }
      for (const tick of (log.y ? logTicks : ticks)(y0, y1, 5)) {
        const y = this.y.at(tick);
        add(svg, "path", { class: "grid", d: `M${LEFT} ${y}H${width - RIGHT}` });
        add(svg, "text", { class: "tick", "text-anchor": "end", x: LEFT - 6, y: y + 4 }, short(tick));
      }
      for (const tick of (log.x ? logTicks : ticks)(x0, x1, Math.max(2, Math.floor(width / 100)))) {
        const place = { class: "tick", "text-anchor": "middle", x: this.x.at(tick), y: bottom + 16 };
        add(svg, "text", place, short(tick));
      }
      add(svg, "text", { class: "tick", "text-anchor": "end", x: width - RIGHT, y: HEIGHT - 6 }, data.xLabel);
      const inside = add(svg, "g", { "clip-path": `url(#${id})` });
      for (const mark of data.marks) this.drawMark(inside, mark, bottom);
      for (const line of data.lines) this.drawLine(inside, line);
      this.cursor = add(svg, "path", { class: "cursor" });
      this.zoomBox = add(svg, "rect", { class: "zoom", y: TOP, height: bottom - TOP, width: 0 });
    }

    drawMark(parent, mark, bottom) {
      const x = this.x.at(mark.x);
      if (!Number.isFinite(x)) return;
      const shapes = {
        saved: `M${x} ${bottom}v-8`, skipped: `M${x - 3} ${TOP}l6 6m0 -6l-6 6`, spike: `M${x - 4} ${TOP}h8l-4 7z`,
        accepted: `M${x - 3} ${TOP + 3}h6m-3 -3v6`,
      };
      const d = shapes[mark.kind] || `M${x} ${TOP}V${bottom}`;
      const node = add(parent, "path", { class: `mark ${mark.kind} run${mark.run % COLORS}`, d });
      add(node, "title", {}, mark.text);
    }

    drawLine(parent, line) {
      const color = "run" + (line.run % COLORS), points = [];
      line.y.forEach((value, i) => {
        const x = this.x.at(line.x[i]), y = this.y.at(value);
        if (Number.isFinite(x) && Number.isFinite(y)) points.push([x, y]);
      });
      if (!points.length) return;
      const d = "M" + points.map(([x, y]) => x.toFixed(1) + " " + y.toFixed(1)).join("L");
      add(parent, "path", { class: `line ${line.style} ${color}`, d });
      if (points.length > FEW || line.style !== "plain") return;
      for (const [x, y] of points) add(parent, "circle", { class: color, cx: x, cy: y, r: 2.5 });
    }

    move(event) {
      const pixel = this.pixel(event), at = this.x.value(pixel);
      if (this.from !== undefined && event.buttons && Math.abs(pixel - this.from) > 4) {
        this.zoomBox.setAttribute("x", Math.min(pixel, this.from));
        this.zoomBox.setAttribute("width", Math.abs(pixel - this.from));
      }
      const rows = new Map();
      let place;
      for (const line of this.data.lines) {
        const i = nearest(line.x, at);
        if (i < 0) continue;
        if (place === undefined || Math.abs(line.x[i] - at) < Math.abs(place - at)) place = line.x[i];
        const text = line.y[i].toPrecision(5) * 1;
        const before = rows.get(line.run);
        rows.set(line.run, line.style === "smooth" && before !== undefined ? `${before} (median ${text})` : text);
      }
      if (place === undefined) return;
      this.cursor.setAttribute("d", `M${this.x.at(place)} ${TOP}V${HEIGHT - BOTTOM}`);
      this.tip.replaceChildren(`${this.data.xLabel}: ${place.toLocaleString("en")}`);
      for (const [run, text] of rows) {
        const row = document.createElement("div"), swatch = document.createElement("span");
        swatch.className = "swatch run" + (run % COLORS);
        row.append(swatch, `${page.runs[run]}: ${text} ${this.data.unit}`);
        this.tip.append(row);
      }
      this.tip.hidden = false;
      const box = this.figure.getBoundingClientRect(), right = pixel > box.width / 2;
      const top = this.svg.getBoundingClientRect().top - box.top;
      this.tip.style.left = right ? "" : `${pixel + 14}px`;
      this.tip.style.right = right ? `${box.width - pixel + 14}px` : "";
      this.tip.style.top = `${top + 16}px`;
    }

    release(event) {
      const to = this.pixel(event), from = this.from;
      this.from = undefined;
      this.zoomBox.setAttribute("width", 0);
      if (from === undefined || Math.abs(to - from) < 8) return;
      this.zoomed = [this.x.value(Math.min(from, to)), this.x.value(Math.max(from, to))];
      this.draw();
    }

    leave() {
      this.tip.hidden = true;
      this.from = undefined;
      this.cursor.setAttribute("d", "");
      this.zoomBox.setAttribute("width", 0);
    }
  }

  // The index of the value nearest to `at` in a sorted list; -1 if the list is empty.
  function nearest(values, at) {
    let low = 0, high = values.length - 1;
    if (high < 0) return -1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (values[middle] < at) low = middle;
      else high = middle;
    }
    return Math.abs(values[low] - at) <= Math.abs(values[high] - at) ? low : high;
  }

  for (const figure of document.querySelectorAll("figure[data-chart]")) new Chart(figure);
})();
