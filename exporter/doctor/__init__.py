"""Examine a published model: what is wrong with it or soon will be. Nothing is changed."""
