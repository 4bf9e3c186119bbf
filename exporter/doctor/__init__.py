"""Examine a published model: what is wrong with it or soon will be. Nothing is changed.

`examination` asks for everything that lies on disk; `replicas` judges what model servers answered.
"""
