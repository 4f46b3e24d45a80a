"""One page of HTML about a machine's kernels, from plain data: `page.py` renders it, `roofline.py` draws its plot.

The page loads nothing: its style and its script are part of it, and its policy lets no other run. What it shows of
names on disk and in tables is text, whatever characters it has.
"""
