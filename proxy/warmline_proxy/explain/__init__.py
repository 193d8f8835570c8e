"""Prefix hygiene: what clients change at the top of each prompt, for nothing; found, named, and evened out on request.

A prompt that differs at its top from the last one is computed anew from there, whatever the conversation below it.
"""
