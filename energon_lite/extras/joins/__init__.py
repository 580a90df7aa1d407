"""Joined datasets: samples of several datasets under the same key."""
