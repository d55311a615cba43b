"""Measuring drafters: answers, β and γ, losslessness, replay, reports and plots."""
