"""llama.cpp in this process, from the package `xllamacpp`: the ids and the log-probabilities that its server gives."""

import http.client
import json


class LlamaServer:
    """llama.cpp's server of a GGUF file; with `wide`, keys and values are kept in float32."""

    def __init__(self, path, wide=False):
        import xllamacpp  # noqa: PLC0415 - the tests are skipped without it

        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 1024, 1, 1
        params.warmup = params.ui = params.fit_params = False
        params.verbosity = -1
        if wide:
            params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
            params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.server = xllamacpp.Server(params)
        self.connection = http.client.HTTPConnection(self.server.listening_address.removeprefix("http://"))

    def ids(self, text):
        """The ids of a text, without tokens around it and special ones in it."""
        return self._post("/tokenize", content=text, add_special=False, parse_special=False)["tokens"]

    def likeliest(self, prompt, count):
        """The log-probabilities of the `count` likeliest tokens after the ids of a prompt, by id."""
        how = {"n_predict": 1, "n_probs": count, "temperature": 0, "cache_prompt": True}
        [token] = self._post("/completion", prompt=prompt, **how)["completion_probabilities"]
        return {each["id"]: each["logprob"] for each in token["top_logprobs"]}

    def _post(self, place, **body):
        self.connection.request("POST", place, json.dumps(body), {"Content-Type": "application/json"})
        response = self.connection.getresponse()
        content = response.read()
        assert response.status == 200, content
        self.connection.close()  # the server drops it after seconds without a request; the next one opens another
        return json.loads(content)
