"""Instructor: a typed result, by tools and by JSON schema."""
# needs: instructor==1.17.0

import json
import os
from typing import Literal

import instructor
import openai
from pydantic import BaseModel

URL, MODEL = os.environ["EXO_URL"], os.environ["EXO_MODEL"]


class Place(BaseModel):
    city: Literal["Bern", "Rome"]
    days: Literal[1, 2, 3]


told = []
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    raw = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
    client = instructor.from_openai(raw, mode=mode)
    place = client.chat.completions.create(
        model=MODEL,
        response_model=Place,
        max_tokens=300,
        temperature=0,
        messages=[{"role": "user", "content": "hello"}],
    )
    told.append(place.model_dump())
print(json.dumps(told))
