"""Parts of the validator: values made comparable, schemas reduced to known keywords, and keywords.  Any thread."""
