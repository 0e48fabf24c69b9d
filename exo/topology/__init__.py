"""Machines and where layers go."""
