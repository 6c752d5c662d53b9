"""Measurements, the demonstration, and the table of optimizers that the tests share with them."""
