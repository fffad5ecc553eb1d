"""How a planning is shown: rows, drawings, the page."""
