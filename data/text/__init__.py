"""Conversations as text: files of rows, chat templates, tokens and masks, questions."""
