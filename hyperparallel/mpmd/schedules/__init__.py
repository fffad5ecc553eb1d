"""The named pipeline schedules: a record each (`record.py`), one file a family, one table (`table.py`)."""
