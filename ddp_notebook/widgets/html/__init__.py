"""The monitor without JavaScript: HTML and SVG that are redrawn in place. Used if no widget is shown, or on demand.

view           the display of the page, and the times of its redraws
page           one redraw of the whole page, at most 20 kB
sources        the data of a page: a feed, and the series of metrics
series         one metric on all ranks, in bounded memory
metric_curves  a metric by step
step_bars      how the time of each step was spent
rank_table     the state of each rank; with many ranks the worst ones, and a summary of the others
axes           ticks of a chart, and the positions of values
markup         elements with escaped texts, and compact paths
style.css      colours of the page, or colours that are readable on light and on dark pages
"""
