// Draw every figure of the page, in the colours that its CSS has now: again when the reader changes to dark or light.
"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const finger = matchMedia("(pointer: coarse)").matches;

  const colored = (value, style) => {
    if (Array.isArray(value)) return value.map((one) => colored(one, style));
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, colored(one, style)]));
    const name = typeof value === "string" && value.match(/^var\((--[a-z-]+)\)$/);
    return name ? style.getPropertyValue(name[1]).trim() : value;
  };

  const draw = () => {
    const style = getComputedStyle(document.documentElement);
    for (const [id, figure] of Object.entries(figures)) {
      const { data, layout } = colored(figure, style);
      layout.dragmode = finger ? false : "zoom"; // a finger scrolls the page
      Plotly.react(document.getElementById(id), data, layout, { responsive: true, displayModeBar: false });
    }
  };

  draw();
  dark.addEventListener("change", draw);
})();
