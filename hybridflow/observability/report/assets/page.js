// A cross-hair with values over every chart; the page reads well without it.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const tip = document.body.appendChild(document.createElement("div"));
  tip.id = "tip";
  tip.hidden = true;

  const scale = ([low, high, start, end], value, log) => {
    const at = log ? Math.log10 : (v) => v;
    return start + ((at(value) - at(low)) / (at(high) - at(low))) * (end - start);
  };
  const nearest = (steps, step) => {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] <= step) low = middle; else high = middle;
    }
    return Math.abs(steps[high] - step) < Math.abs(steps[low] - step) ? high : low;
  };
  const element = (name, attributes) => {
    const made = document.createElementNS(SVG, name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    return made;
  };

  const faults = JSON.parse(document.getElementById("faults")?.dataset.faults ?? "[]");
  const NEAR = 5;

  for (const svg of document.querySelectorAll("svg[data-chart]")) {
    const data = JSON.parse(svg.dataset.chart);
    const layer = svg.appendChild(element("g", {}));
    const leave = () => { layer.replaceChildren(); tip.hidden = true; };
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
      const [low, high, start, end] = data.x;
      const wanted = low + ((x - start) / (end - start)) * (high - low);
      const marks = [], lines = [];
      const steps = data.series.filter((series) => series.x.length).map((series) => series.x[nearest(series.x, wanted)]);
      if (!steps.length) return;
      const shown = steps[nearest(steps.sort((a, b) => a - b), wanted)];
      data.series.forEach((series, place) => {
        if (!series.x.length || series.x[0] > shown || series.x[series.x.length - 1] < shown) return;
        const at = nearest(series.x, shown), value = series.y[at];
        lines.push(series.label + "  " + (value === null ? "not finite" : value));
        if (value === null || (data.log && value <= 0)) return;
        marks.push(element("circle", {
          class: "dot c" + (place % 11), r: 3.5, cx: scale(data.x, series.x[at], false), cy: scale(data.y, value, data.log),
        }));
      });
      for (const [at, said] of faults)
        if (Math.abs(scale(data.x, Math.min(Math.max(at, low), high), false) - x) < NEAR) lines.push(said);
      const across = scale(data.x, shown, false);
      layer.replaceChildren(
        element("line", { class: "cross", x1: across, x2: across, y1: data.y[3], y2: data.y[2] }), ...marks);
      tip.textContent = "step " + shown + "\n" + lines.join("\n");
      tip.hidden = false;
      const left = event.clientX + 14;
      tip.style.left = (left + tip.offsetWidth > innerWidth ? event.clientX - 14 - tip.offsetWidth : left) + "px";
      tip.style.top = Math.max(4, event.clientY - tip.offsetHeight - 10) + "px";
    });
  }
})();
// A page that refresh.js has loaded again is as it was left: scrolled, with the same parts open.
(() => {
  const kept = history.state;
  if (!kept || !kept.open) return;
  history.scrollRestoration = "manual";
  for (const part of document.querySelectorAll("details[id], input[id]"))
    part[part.open === undefined ? "checked" : "open"] = kept.open.includes(part.id);
  scrollTo(0, kept.top);
})();
