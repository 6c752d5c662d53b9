"""Helpers for other libraries' training loops; each needs its library to be installed."""
