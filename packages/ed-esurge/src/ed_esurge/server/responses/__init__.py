"""`/v1/responses`: OpenAI's newer API, stored and chained."""
