"""Rewrites programs as a plan says; decides nothing."""
