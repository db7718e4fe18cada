"""The monitor without JavaScript: HTML and SVG, redrawn in place where no widget is shown, or on demand.

view           where it stands, and when it is redrawn
page           one redraw: everything on it, and no more than 20 kB
sources        what a page is drawn from: a feed, and the courses of metrics
series         the course of one metric on all ranks, in bounded memory
metric_curves  a metric by step
step_bars      what the time of each step went into
rank_table     how each rank is; of many ranks the worst, and the others together
axes           a chart's ticks, and where a value lies
markup         elements whose texts are escaped, and paths in few bytes
style.css   colours are the page's, or read on light and on dark ones
"""
