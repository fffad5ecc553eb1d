"""Why a strategy is as it is, and how a planning is shown: reasons, advice, rows, the page."""
