import uPlot from "uplot";
export default { render({ el }) { el.textContent = String(uPlot); } };
