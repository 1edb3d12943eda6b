"""Keep days of sent rows elsewhere, as Parquet that was compared with the table: start at archive.py."""
